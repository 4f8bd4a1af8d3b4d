"""The model.json files people have: read as they are, their dead keys listed once, their other values refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_models.config.family import family_of_model
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.strict import validate
from mm_models.errors import UserError
from mm_models.layout import ParallelLayout

FILES = Path(__file__).parent / "field"
LAYOUTS = {
    "qwen2vl_model_7b": ("Qwen2VLConverter", 4),
    "qwen2_5vl_model_3b": ("Qwen2_5_VLConverter", 1),
    "qwen2_5vl_model_7b": ("Qwen2_5_VLConverter", 2),
    "qwen2_5vl_model_32b": ("Qwen2_5_VLConverter", 8),
    "qwen2_5vl_model_72b": ("Qwen2_5_VLConverter", 8),
    "glm4_1v_model_9b": ("GlmConverter", 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_of_the_field_load_as_they_are(name):
    said: list[str] = []
    converter, pp = LAYOUTS[name]
    path = FILES / f"{name}.json"
    model = load_model_config(path, said.append)
    assert family_of_model(model).name == converter
    split = model.split(ParallelLayout(tp=1, pp=pp))
    assert split.text.nested()[0] == json.loads(path.read_text())["text_decoder"]["pipeline_num_layers"]
    assert len(said) == 1 and "keys without effect here, not used" in said[0]
    for section, keys in (
        ("vision_encoder", "hidden_dropout"),
        ("vision_projector", "num_layers"),
        ("text_decoder", "parallel_output"),
    ):
        assert keys in said[0].split(section)[1].split(";")[0]


def test_what_counts_in_the_glm_file():
    """Its `layernorm_epsilon` 1e-6 is dead, `rms_norm_eps` 1e-5 is what that tool computes with; so are window and llm_hidden_size."""
    model = load_model_config(FILES / "glm4_1v_model_9b.json")
    assert model.text.eps == model.vision.eps == 1e-5
    assert model.text.kv_channels == 128 and model.text.rotary_dim == 64 and model.text.rotary_interleaved
    assert model.projector.out_features == 4096


def test_a_file_of_another_schema_is_refused_with_what_contradicts():
    with pytest.raises(UserError) as caught:
        load_model_config(FILES / "glm4_5v_model_106B.json")
    text = str(caught.value)
    assert "init_from_hf_path says that the model is built from ./ckpt/hf_path/GLM-4.5V/config.json" in text
    assert "text_decoder.hidden_size is 12288, not 4096" in text and "num_moe_experts" in text
    assert "mm-models init --hf ./ckpt/hf_path/GLM-4.5V" in text


@pytest.mark.parametrize(
    "section,key,value,words",
    [
        ("vision_encoder", "hidden_dropout", 0.1, "hidden_dropout is 0.1; model_id 'qwen2vit' knows only 0"),
        ("vision_encoder", "post_layer_norm", True, "post_layer_norm is True"),
        ("vision_encoder", "use_vit_dp", True, "use_vit_dp is True"),
        ("vision_encoder", "fp16", True, "fp16 is True"),
        ("vision_projector", "num_layers", 2, "num_layers is 2"),
        ("vision_projector", "input_size", 640, "input_size 640 and ffn_hidden_size 5120, expected the encoder's hidden_size 1280"),
        ("text_decoder", "rope_scaling", {"type": "yarn"}, "rope_scaling is {'type': 'yarn'}"),
        ("text_decoder", "group_query_attention", False, "group_query_attention is False"),
        ("text_decoder", "canonical_model", True, "canonical_model is True"),
        ("text_decoder", "attention_softmax_in_fp32", False, "attention_softmax_in_fp32 is False"),
        ("text_decoder", "num_moe_experts", 8, "num_moe_experts"),
        ("text_decoder", "add_qkv_bias", False, "add_qkv_bias"),
        ("text_decoder", "num_query_group", 4, "did you mean 'num_query_groups'"),
        ("vision_encoder", "windw_attn_size", 112, "did you mean 'window_attn_size'"),
        ("vision_encoder", "model_id", "qwen2lm", "model_id 'qwen2lm' is not a vision_encoder but a text_decoder"),
    ],
)  # fmt: skip
def test_a_value_that_asks_for_something_else_is_refused(section, key, value, words):
    content = json.loads((FILES / "qwen2_5vl_model_7b.json").read_text())
    place = content if section == "text_decoder" else content["image_encoder"]
    place[section][key] = value
    with pytest.raises(UserError) as caught:
        validate(ModelConfig, content, "model.json")
    assert words in str(caught.value)
