"""Null sections build nothing: a decoder alone and a vision tower alone assemble, and compute what Hugging Face computes."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run
from tests.mcore.batches import batch, hf_sum_loss
from tests.mcore.cases import assemble
from tests.models import tiny_glm_model


def text_case(rank: int, degrees: dict) -> dict:
    hf = tiny_glm_model(0)
    chunks, _, layout = assemble(hf, extra={"image_encoder": None}, **degrees)
    names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
    data = batch(3, images=[[]])
    if layout.pp > 1:
        return {"vision": [name for name in names if name.startswith("image")], "needs": sorted(chunks[0].needs())}
    with torch.no_grad():
        equal = torch.equal(chunks[0](data), hf_sum_loss(hf, data)[1])
    return {"vision": [name for name in names if name.startswith("image")], "equal": equal}


def test_text_only_model():
    assert run(text_case, 1, {}) == [{"vision": [], "equal": True}]
    assert run(text_case, 2, {"pp": 2}) == [
        {"vision": [], "needs": ["grid", "ids", "positions"]},
        {"vision": [], "needs": ["labels", "positions"]},
    ]


def encoder_case(rank: int) -> dict:
    hf = tiny_glm_model(0)
    chunks, _, _ = assemble(hf, extra={"text_decoder": None})
    data = batch(3, images=[[(4, 6), (2, 4)]], length=48)
    with torch.no_grad():
        features = chunks[0](data).squeeze(1)
        expected = hf.model.visual(data["pixel_values"], data["image_grid_thw"]).pooler_output
    return {
        "text": [n for n, _ in chunks[0].named_parameters() if n.startswith("text")],
        "equal": torch.equal(features, expected),
    }


def test_encoder_only_model():
    assert run(encoder_case, 1) == [{"text": [], "equal": True}]


def mismatch_case(rank: int) -> str:
    hf = tiny_glm_model(0)
    chunks, _, _ = assemble(hf)
    data = batch(3)
    data["input_ids"][0, -1] = 300  # one image token too many
    with pytest.raises(ValueError, match="sample 0 of the batch has 5 image tokens") as caught:
        chunks[0](data)
    return str(caught.value)


def test_image_tokens_without_features_are_refused():
    assert "images 0.. have [4] features" in run(mismatch_case, 1)[0]
