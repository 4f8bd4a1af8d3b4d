"""config.json with one field at an odd value: the same logits and loss as Hugging Face's, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mm_models.config.family import family_of
from mm_models.errors import UserError
from mm_models.fsdp2 import assembly
from mm_models.ops import choose
from mm_models.registry import table
from tests.fsdp2 import kit
from tests.mcore.batches import batch, hf_sum_loss
from tests.models import FAMILIES, fill_distinct, tiny_config

TEXT, VISION, ROPE = "text_config.", "vision_config.", "text_config.rope_parameters."
EVERY: dict[str, dict[str, Any]] = {
    "theta": {ROPE + "rope_theta": 123.5},
    "eps": {TEXT + "rms_norm_eps": 1e-2},
    "tied": {"tie_word_embeddings": True},
    "no groups": {TEXT + "num_key_value_heads": None},
    "one group": {TEXT + "num_key_value_heads": 1},
    "vision heads": {VISION + "num_heads": 2},
    "patch": {VISION + "temporal_patch_size": 1},
}
QWEN = EVERY | {
    "sections": {ROPE + "mrope_section": [5, 2, 1]},
    "heads": {TEXT + "num_attention_heads": 2, ROPE + "mrope_section": [3, 6, 7]},
}
SAME: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_vl": QWEN | {"wide MLP": {VISION + "mlp_ratio": 5}},
    "qwen2_5_vl": QWEN
    | {
        "wide MLP": {VISION + "intermediate_size": 40},
        "window of one token": {VISION + "window_size": 28},
        "window of three": {VISION + "window_size": 84},
        "window with a rest": {VISION + "window_size": 70},
        "window larger than images": {VISION + "window_size": 1120},
        "windows everywhere": {VISION + "fullatt_block_indexes": []},
        "windows nowhere": {VISION + "fullatt_block_indexes": [0, 1, 2, 3]},
        "first block alone": {VISION + "fullatt_block_indexes": [0]},
        "seconds": {VISION + "tokens_per_second": 5},
    },
    "glm4v": EVERY
    | {
        "sections": {ROPE + "mrope_section": [2, 1, 1]},
        "whole rotary": {ROPE + "partial_rotary_factor": 1.0, ROPE + "mrope_section": [2, 3, 3]},
        "heads": {TEXT + "num_attention_heads": 2, ROPE + "mrope_section": [2, 3, 3]},
        "vision eps": {VISION + "rms_norm_eps": 1e-2},
        "table": {VISION + "image_size": 84},
    },
}
SLIDING = {TEXT + "use_sliding_window": True, TEXT + "sliding_window": 8, TEXT + "max_window_layers": 2}
YARN = {ROPE + "rope_type": "yarn", ROPE + "factor": 2.0, ROPE + "original_max_position_embeddings": 512}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((family, {TEXT + "hidden_act": "gelu"}, "gelu") for family in SAME),
    *((family, {TEXT + "attention_dropout": 0.1}, "attention_dropout is 0.1") for family in SAME),
    *((family, YARN, "yarn") for family in SAME),
    *((family, {ROPE + "mrope_section": [1, 1, 1]}, "mrope_section") for family in SAME),
    ("qwen2_vl", {VISION + "hidden_act": "silu"}, "silu"),
    ("qwen2_5_vl", {VISION + "hidden_act": "quick_gelu"}, "quick_gelu"),
    ("qwen2_vl", SLIDING, "sliding_window"),
    ("qwen2_5_vl", SLIDING, "sliding_window"),
    ("qwen2_5_vl", {VISION + "window_size": 20}, "window"),
]


def changed(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    content = tiny_config(family).to_dict()
    content["text_config"].pop("layer_types", None)  # Hugging Face derives it
    for key, value in changes.items():
        *path, last = key.split(".")
        place = content
        for part in path:
            place = place[part]
        place[last] = value
    return content


def network(family: str, content: dict[str, Any]) -> torch.nn.Module:
    import transformers

    known = FAMILIES[family]
    config = getattr(transformers, known.config).from_dict(content)
    config._attn_implementation = "sdpa"
    model = getattr(transformers, known.model)(config).float().eval()
    fill_distinct(model, 3)
    return model


def slow(family: str, name: str) -> bool:
    """Fields that another family has tried."""
    return family != "qwen2_5_vl" and name in (QWEN if family == "qwen2_vl" else EVERY)


@functools.cache
def usual_loss(family: str) -> torch.Tensor:
    """Of the unchanged model on the same batch."""
    with torch.no_grad():
        return hf_sum_loss(network(family, changed(family, {})), ragged())[1]


def ragged(features: int = 1176) -> dict[str, torch.Tensor]:
    part = batch(5, images=[[(6, 10)], [(4, 4), (2, 6)]], length=56, features=features)
    part["attention_mask"][1, -5:] = 0
    part["labels"][1, -5:] = -100
    return part


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.slow] if slow(family, name) else [])
        for family in SAME
        for name in SAME[family]
    ],
)
def test_same_as_hugging_face(family, name):
    content = changed(family, SAME[family][name])
    family_of(content, "config.json").model(content)
    hf = network(family, content)
    part = ragged(3 * content["vision_config"]["temporal_patch_size"] * 14**2)
    model = kit.plain(hf)
    with torch.no_grad():
        logits, loss = hf_sum_loss(hf, part)
        assert torch.equal(model({k: v for k, v in part.items() if k != "labels"}), logits)
        assert torch.equal(model(part), loss)
    assert name in UNSEEN or not torch.equal(usual_loss(family), loss), "the field changes nothing"


UNSEEN = ("seconds", "window with a rest")
"""Fields that change no loss of images."""


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_refused_by_name(family, changes, message):
    content = changed(family, changes)
    with pytest.raises(UserError, match=message):
        family_of(content, "config.json").model(content)
        assembly.build(table("models").get(family), content, ops=choose("cpu"))
