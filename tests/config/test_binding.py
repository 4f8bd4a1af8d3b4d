"""What two descriptions of the same weights must agree on, and what each may say its own way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_models.config.binding import differences
from mm_models.config.family import family_of_model
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.errors import UserError
from tests.models import tiny_config, tiny_model_json

FILES = sorted((Path(__file__).parent / "field").glob("*.json"))
OTHER_SCHEMA = "glm4_5v_model_106B"


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != OTHER_SCHEMA], ids=lambda path: path.stem)
def test_files_of_the_field_fit_the_weights_they_are_for(path):
    """Converted without the file, or as Hugging Face has them: ids, names and token ids are said in other words there."""
    model = load_model_config(path)
    family = family_of_model(model)
    config = family.hf_config(model)
    assert list(differences(model, family.model(config))) == []
    family.check_model(model, config)
    assert None not in config.values()


CHANGES = {
    "split": (("text_decoder", "pipeline_num_layers"), [1, 3], False),
    "freeze": (("text_decoder", "freeze"), ["decoder.*"], False),
    "draw": (("text_decoder", "init_method_std"), 0.5, False),
    "loss": (("loss_cfg",), {"loss_type": "per_token_loss"}, False),
    "patch": (("patch",), {"bridge_patch": True}, False),
    "name": (("model_id",), "mine", False),
    "other name of the decoder": (("text_decoder", "model_id"), "qwen2lm", False),
    "other name of the tower": (("image_encoder", "vision_encoder", "model_id"), "qwen2_5_vit", False),
    "token not said": (("video_token_id",), None, False),
    "token": (("video_token_id",), 7, True),
    "theta": (("text_decoder", "rope_theta"), 77.0, True),
    "window": (("image_encoder", "vision_encoder", "window_attn_size"), 84, True),
    "no window": (("image_encoder", "vision_encoder", "window_attn_size"), None, True),
    "decoder": (("text_decoder", "model_id"), "glm4v_lm", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_binds(change):
    path, value, binds = CHANGES[change]
    content = tiny_model_json(tiny_config("qwen2_5_vl"))
    here = ModelConfig.model_validate(content)
    changed = json.loads(json.dumps(content))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if value == "glm4v_lm":
        place["rms_norm_eps"] = place.pop("layernorm_epsilon")
    found = [key for key, *_ in differences(here, ModelConfig.model_validate(changed))]
    if change == "decoder":
        assert "text_decoder.model_id" in found
    else:
        assert found == ([".".join(path)] if binds else [])


def test_a_token_id_that_is_said_is_compared_with_hugging_faces():
    config = tiny_config("qwen2_5_vl").to_dict()
    content = tiny_model_json(tiny_config("qwen2_5_vl"))
    model = ModelConfig.model_validate(content | {"video_token_id": 7})
    with pytest.raises(UserError, match=r"video_token_id is 7, config.json \(video_token_id\) means 301"):
        family_of_model(model).check_model(model, config)
