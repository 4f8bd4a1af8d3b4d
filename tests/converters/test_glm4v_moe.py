"""GLM-4.5V's weight map against transformers' own module tree, and its config map, both ways and in both spellings."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

from converters.glm4v_moe.converter import Glm4vMoeConverter as FAMILY
from mm_models.config.family import family_of, family_of_model
from mm_models.config.model import ModelConfig
from mm_models.config.strict import validate
from mm_models.errors import UserError
from mm_models.weights.boxes import volume
from mm_models.weights.model_map import build
from tests.models import tiny_glm_config, tiny_glm_model, tiny_model_json

HUB = {  # GLM-4.5V's config.json as transformers 4.57 wrote it, the fields that matter
    "model_type": "glm4v_moe",
    "image_token_id": 151363, "video_token_id": 151364, "image_start_token_id": 151339, "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True, "use_qk_norm": False, "intermediate_size": 10944, "first_k_dense_replace": 1, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, 
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}, "max_position_embeddings": 65536,
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096, "intermediate_size": 10944, "image_size": 336,
        "patch_size": 14,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "hidden_act": "silu", "attention_bias": False, 
        "rms_norm_eps": 1e-5,
    },
}  # fmt: skip


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides", [{}, {"attention_bias": False}, {"tie_word_embeddings": True}, {"first_k_dense_replace": 2}], ids=str
)
def test_the_map_is_transformers_module_tree(overrides):
    """Every parameter and persistent buffer, by name and shape, with nothing over."""
    config = tiny_glm_config(**overrides)
    with torch.device("meta"):
        state = Glm4vMoeForConditionalGeneration(config).state_dict()
    if overrides.get("tie_word_embeddings"):
        state.pop("lm_head.weight")
    wmap = build(FAMILY.model(config.to_dict()), FAMILY.prefixes)
    assert {name: tensor.shape for name, tensor in wmap.hf("stacked_hf").items()} == {
        name: tuple(t.shape) for name, t in state.items()
    }


def test_the_full_model_has_107_7_billion_parameters():
    wmap = build(FAMILY.model(HUB), FAMILY.prefixes)
    counts = {
        kind: sum(volume(t.shape) for t in wmap.tensors.values() if t.kind == kind) for kind in ("param", "buffer")
    }
    assert counts == {"param": 107_710_927_360, "buffer": 45 * 128}
    for layout in ("per_expert", "stacked_hf"):
        assert sum(volume(t.shape) for t in wmap.hf(layout).values()) == sum(counts.values())


def test_per_expert_names_are_those_transformers_saves(tmp_path):
    from safetensors import safe_open

    tiny_glm_model(0, torch.bfloat16).save_pretrained(tmp_path)
    wmap = build(FAMILY.model(tiny_glm_config().to_dict()), FAMILY.prefixes)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name: list(t.shape) for name, t in wmap.hf("per_expert").items()} == {
            name: file.get_slice(name).get_shape() for name in sorted(file.keys())
        }


def test_only_the_router_is_held_in_fp32():
    held = {name for name, tensor in build(FAMILY.model(HUB)).tensors.items() if tensor.hold == "fp32"}
    assert held == {
        f"text_decoder.decoder.layers.{i}.mlp.router.{name}"
        for i in range(1, 46)
        for name in ("weight", "e_score_correction_bias")
    }


def test_known_extras_are_the_layer_behind_the_last():
    model = FAMILY.model(HUB)
    assert FAMILY.is_extra("model.language_model.layers.46.eh_proj.weight", model)
    for name in (
        "model.language_model.layers.45.mlp.gate.weight",
        "model.language_model.layers.47.x",
        "model.language_model.layers.460.x",
        "model.x",
    ):
        assert not FAMILY.is_extra(name, model)


def test_parts_alone_have_maps():
    """Text only, and encoder only: a section that is null has no tensors."""
    content = FAMILY.model_json(HUB)
    text = build(validate(ModelConfig, content | {"image_encoder": None}, "t"))
    vision = build(validate(ModelConfig, content | {"text_decoder": None}, "v"))
    whole = build(validate(ModelConfig, content, "w"))
    assert set(text.tensors) | set(vision.tensors) == set(whole.tensors) and not set(text.tensors) & set(vision.tensors)


# --- config -------------------------------------------------------------------------------------------------------


def test_old_and_new_spellings_mean_the_same():
    new = Glm4vMoeConfig(**copy.deepcopy(HUB)).to_dict()
    assert "rope_parameters" in new["text_config"] and "rope_theta" not in new["text_config"]
    assert FAMILY.model_json(new) == FAMILY.model_json(HUB)
    assert not FAMILY.unread_keys(new) and not FAMILY.unread_keys(HUB)


def test_model_json_says_what_the_field_names_it():
    content = FAMILY.model_json(HUB)
    text, vision, projector = (
        content["text_decoder"],
        content["image_encoder"]["vision_encoder"],
        content["image_encoder"]["vision_projector"],
    )
    assert (text["kv_channels"], text["num_query_groups"], text["num_moe_experts"], text["moe_router_topk"]) == (
        128,
        8,
        128,
        8,
    )
    assert text["mrope_section"] == [8, 12, 12] and text["untie_embeddings_and_output_weights"] and text["add_qkv_bias"]
    assert (vision["ffn_hidden_size"], vision["out_hidden_size"], projector["intermediate_size"]) == (4096, 4096, 10944)
    assert content["img_context_token_id"] == 151363 and content["model_id"] == "glm4v_moe"


def test_absent_fields_mean_transformers_defaults():
    """Nothing but the model type: the class's own defaults, except head_dim, which transformers derives."""
    empty = {"model_type": "glm4v_moe", "text_config": {}, "vision_config": {}}
    defaults = Glm4vMoeConfig().to_dict()
    defaults["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 12]
    assert FAMILY.model_json(empty) == FAMILY.model_json(defaults)
    assert FAMILY.model_json(empty)["text_decoder"]["kv_channels"] == 4096 // 96


def test_the_way_back_is_a_config_of_the_same_model():
    model = FAMILY.model(HUB)
    config = Glm4vMoeConfig(**FAMILY.hf_config(model))
    assert FAMILY.model(config.to_dict()) == model
    assert family_of(FAMILY.hf_config(model), "x") is FAMILY and family_of_model(model) is FAMILY


@pytest.mark.parametrize(
    ("root", "text", "tied"),
    [(True, False, True), (False, True, True), (False, False, False), (None, True, True), (None, None, False)],
)
def test_tied_embeddings_in_either_place(root, text, tied):
    """4.57 keeps the flag in text_config, 5.x at the root and forwards the other."""
    config = copy.deepcopy(HUB)
    for section, value in ((config, root), (config["text_config"], text)):
        section.pop("tie_word_embeddings", None)
        if value is not None:
            section["tie_word_embeddings"] = value
    assert FAMILY.model(config).tied is tied
    assert Glm4vMoeConfig(**copy.deepcopy(config)).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (
            "text_config",
            {"rope_scaling": {"rope_type": "yarn", "mrope_section": [8, 12, 12]}},
            "rope_scaling.rope_type is 'yarn'",
        ),
        (
            "text_config",
            {"rope_parameters": {"rope_theta": 5e5}},
            r"rope_parameters.rope_theta = 500000.0 disagrees with text_config.rope_theta = 10000.0",
        ),
        ("text_config", {"hidden_act": "gelu"}, "activation_func"),
        ("text_config", {"num_attention_heads": 97}, "does not divide by num_query_groups"),
        ("text_config", {"head_dim": None}, "mrope_section"),
        ("vision_config", {"attention_bias": True}, "attention_bias"),
        ("vision_config", {"image_size": [336, 336]}, "image_size"),
        ("vision_config", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "knows only 'axial'"),
    ],
    ids=str,
)
def test_what_the_components_cannot_compute_is_refused(section, values, words):
    config = copy.deepcopy(HUB)
    config[section].update(values)
    with pytest.raises(UserError, match=words):
        FAMILY.model(config, "config.json")


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(
        UserError, match=r"model_type 'llava' has no converter. Known: glm4v, glm4v_moe, qwen2_5_vl, qwen2_vl."
    ):
        family_of({"model_type": "llava"}, "x/config.json")


def test_the_tiny_model_json_takes_overrides():
    content = tiny_model_json(
        tiny_glm_config(),
        text_decoder={"pipeline_num_layers": [2, 2]},
        vision_encoder={"freeze": False},
        loss_cfg={"loss_type": "per_token_loss"},
    )
    model = validate(ModelConfig, content, "model.json")
    assert (
        model.text.pipeline_num_layers == [2, 2]
        and model.vision.freeze is False
        and model.loss_cfg.loss_type == "per_token_loss"
    )
