"""Configurations of every family: both ways, in every spelling and nesting; names of tensors; what is refused."""

from __future__ import annotations

import copy

import pytest

from mm_models.config.family import families_of_model, family_of, family_of_model
from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.weights.model_map import build
from tests.models import FAMILIES, tiny_config, tiny_model, tiny_model_json

CONVERTERS = {
    "glm4v_moe": "Glm4vMoeConverter",
    "glm4v": "GlmConverter",
    "qwen2_vl": "Qwen2VLConverter",
    "qwen2_5_vl": "Qwen2_5_VLConverter",
}

QWEN25_HUB = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655,
    "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 128000, "max_window_layers": 70, "model_type": "qwen2_5_vl", "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
"""In the manner of a published file: the decoder's fields at the root."""


@pytest.mark.parametrize("name", FAMILIES)
def test_config_and_tensors_both_ways(name):
    config = tiny_config(name).to_dict()
    family = family_of(config, "config.json")
    model = family.model(config)
    assert family.name == CONVERTERS[name] and family_of_model(model) is family
    family.check_model(model, config)
    assert family.unread_keys(config) == []
    assert family.model(family.hf_config(model)) == model
    state = tiny_model(name).state_dict()
    mapped = build(model, family.prefixes).hf("stacked_hf")
    assert {n: t.shape for n, t in mapped.items()} == {n: tuple(t.shape) for n, t in state.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flat_config_means_the_same(name):
    config = tiny_config(name).to_dict()
    family = family_of(config, "config.json")
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    flat = {key: value for key, value in config.items() if key != "text_config"} | {**text, "model_type": name}
    flat["tie_word_embeddings"] = config["tie_word_embeddings"]
    assert family.model(flat) == family.model(config)
    assert family.nested(flat)["text_config"]["hidden_size"] == 64


def test_a_published_file_of_qwen():
    family = family_of(QWEN25_HUB, "config.json")
    model = family.model(QWEN25_HUB)
    assert family.unread_keys(QWEN25_HUB) == []
    assert model.tied and model.text.kv_channels == 128 and model.text.vocab_size == 151936
    assert (model.vision.window_attn_size, model.vision.window_units) == (112, 4)
    assert model.projector.ffn_hidden_size == 5120 and model.projector.hidden_size == 2048
    total = sum(_volume(t.shape) for t in build(model, family.prefixes).hf("stacked_hf").values())
    assert total == 3_754_622_976


def _volume(shape) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def test_a_copy_at_the_root_must_agree():
    config = tiny_config("qwen2_5_vl").to_dict()
    family = family_of(config, "config.json")
    assert family.model(config | {"hidden_size": 64}) == family.model(config)
    with pytest.raises(UserError, match="hidden_size is 65 at the root, 64 in text_config"):
        family.model(config | {"hidden_size": 65})


@pytest.mark.parametrize(
    "root,words",
    [
        ({"rope_theta": 5.0}, r"rope_theta is 5.0 at the root, 1000000.0 by text_config"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 6]}}, r"mrope_section is \[1, 1, 6\] at the root"),
        ({"rms_norm_eps": 0.5}, r"rms_norm_eps is 0.5 at the root, 1e-05 by text_config"),
    ],
)
def test_a_key_at_the_root_that_text_config_spells_otherwise_or_lacks_must_agree(root, words):
    config = tiny_config("qwen2_5_vl").to_dict()
    del config["text_config"]["rms_norm_eps"]
    family = family_of(config, "config.json")
    rope = config["text_config"]["rope_parameters"]
    agreeing = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    assert family.model(config | agreeing | {"rms_norm_eps": 1e-5}) == family.model(config)
    with pytest.raises(UserError, match=words):
        family.model(config | root)


@pytest.mark.parametrize("name", FAMILIES)
def test_rope_scaling_holds_what_rope_parameters_hold(name):
    config = tiny_config(name).to_dict()
    rope = config["text_config"]["rope_parameters"]
    rope["rope_theta"] = 123.0
    family = family_of(config, "config.json")
    expected = family.model(config).text
    del config["text_config"]["rope_parameters"]
    config["text_config"]["rope_scaling"] = dict(rope)
    assert family.model(config).text == expected
    config["text_config"]["rope_parameters"] = dict(rope)
    assert family.model(config).text == expected


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("flat", [False, True])
def test_rope_parameters_that_transformers_leaves_aside_are_refused(name, flat):
    config = tiny_config(name).to_dict()
    text = config["text_config"]
    text["rope_parameters"]["rope_theta"] = 123.0
    text["rope_scaling"] = {key: value for key, value in text["rope_parameters"].items() if key != "rope_theta"}
    if flat:
        del config["text_config"]
        config |= {key: value for key, value in text.items() if key != "model_type"}
    with pytest.raises(
        UserError, match=r"rope_theta is 123.0, without rope_parameters 1.*transformers reads rope_scaling"
    ):
        family_of(config, "config.json").model(config)


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(UserError, match="expected an object with model_type, got list"):
        family_of([], "config.json")


@pytest.mark.parametrize(
    "change,words",
    [
        ({"text_config": {"use_sliding_window": True}}, "use_sliding_window is True"),
        ({"text_config": {"attention_dropout": 0.1}}, "attention_dropout is 0.1"),
        ({"text_config": {"layer_types": ["full_attention", "sliding_attention"]}}, "layer_types"),
        ({"text_config": {"layer_types": 5}}, "layer_types is 5"),
        ({"text_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"vision_config": {"rope_parameters": {"rope_type": "default"}}}, "rope_type is 'default'"),
        ({"vision_config": {"hidden_act": "gelu"}}, "activation_func"),
        ({"vision_config": {"fullatt_block_indexes": [1, 9]}}, r"names layers \[9\]; the tower has 4"),
        ({"vision_config": {"window_size": 14}}, "window_attn_size 14 is smaller than one merged token, 28 pixels"),
        ({"text_config": {"num_attention_heads": 6}}, "kv_channels"),
    ],
)
def test_what_the_components_cannot_compute_is_refused(change, words):
    config = tiny_config("qwen2_5_vl").to_dict()
    family = family_of(config, "config.json")
    for section, values in change.items():
        for key, value in values.items():
            old = config[section].get(key)
            config[section][key] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
    with pytest.raises(UserError, match=words):
        family.model(config)


def test_null_key_value_heads_mean_as_many_as_queries():
    config = tiny_config("qwen2_vl").to_dict()
    config["text_config"]["num_key_value_heads"] = None
    assert family_of(config, "c").model(config).text.num_query_groups == 4


def test_ids_of_one_structure_are_one_family():
    content = tiny_model_json(tiny_config("qwen2_5_vl"))
    for vision in ("qwen2vit", "qwen2_5_vit"):
        for text in ("qwen2lm", "qwen2_5_lm"):
            content["image_encoder"]["vision_encoder"]["model_id"] = vision
            content["text_decoder"]["model_id"] = text
            assert family_of_model(ModelConfig.model_validate(content)).name == "Qwen2_5_VLConverter"
    del content["image_encoder"]
    names = {family.name for family in families_of_model(ModelConfig.model_validate(content))}
    assert names == {"Qwen2VLConverter", "Qwen2_5_VLConverter"}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_old_and_new_names(name):
    config = tiny_config(name).to_dict()
    family = family_of(config, "c")
    model = family.model(config)
    new = list(build(model, family.prefixes).hf("stacked_hf"))
    assert family.prefixes_of(new) == family.prefixes
    old = list(build(model, family.prefixes | family.old_prefixes).hf("stacked_hf"))
    assert family.prefixes_of(old) == family.prefixes | family.old_prefixes
    assert "visual.merger.ln_q.weight" in old and "model.layers.0.self_attn.q_proj.bias" in old
    vision_new = [n for n in new if ".visual." in n] + [n for n in old if not n.startswith("visual.")]
    assert family.prefixes_of(vision_new)["text_decoder"] == "model."
    assert family.prefixes_of(vision_new)["vision_encoder"] == "model.visual."
    with pytest.raises(UserError, match=r"vision_encoder stands under two names, 'visual\..*' and 'model\.visual\."):
        family.prefixes_of([*new, "visual.blocks.0.norm1.weight"])
    with pytest.raises(UserError, match=r"text_decoder stands under two names, 'model\.norm\.weight'"):
        family.prefixes_of([*new, "model.norm.weight"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_disagreeing_model_json_is_refused(name):
    config = tiny_config(name).to_dict()
    family = family_of(config, "config.json")
    content = tiny_model_json(tiny_config(name))
    content["text_decoder"]["rope_theta"] = 77.0
    with pytest.raises(
        UserError,
        match=r"text_decoder.rope_theta is 77.0, config.json \(text_config.rope_parameters.rope_theta\) means",
    ):
        family.check_model(ModelConfig.model_validate(content), config)
    changed = copy.deepcopy(tiny_model_json(tiny_config(name)))
    changed["text_decoder"]["init_method_std"] = 0.5
    family.check_model(ModelConfig.model_validate(changed), config)  # of a draw from scratch only
