"""One process, TP1: the assembled model against Hugging Face's own, bit by bit; gradients within rounding."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run
from tests.mcore.batches import batch, hf_inputs, hf_sum_loss
from tests.mcore.cases import assemble, relative_gradients
from tests.models import tiny_glm_model

BATCHES = {
    "one image": dict(images=[[(4, 4)]]),
    "two images": dict(images=[[(4, 6), (2, 8)]], length=48),
    "text only": dict(images=[[]]),
    "two samples": dict(images=[[(4, 4)], [(6, 4), (2, 2)]], length=48),
    "image beside text": dict(images=[[], [(4, 4)]]),
}


def forward_case(rank: int, dtype: torch.dtype, kind: dict, overrides: dict) -> dict:
    hf = tiny_glm_model(0, dtype, **overrides)
    chunks, _, _ = assemble(hf, dtype=dtype)
    data = batch(1, **kind)
    with torch.no_grad():
        logits, loss = hf_sum_loss(hf, data)
        reference = hf(**hf_inputs(data), labels=data["labels"]).loss
        ours = chunks[0]({k: v for k, v in data.items() if k != "labels"}).transpose(0, 1)
        summed = chunks[0](data)
    count = int((data["labels"][:, 1:] != -100).sum())
    return {
        "logits": torch.equal(ours, logits),
        "worst": (ours.float() - logits.float()).abs().max().item(),
        "sum": torch.equal(summed, loss),
        "mean": torch.equal(summed / count, reference),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", BATCHES, ids=lambda k: k.replace(" ", "-"))
def test_forward_is_bit_equal(dtype, kind):
    (result,) = run(forward_case, 1, dtype, BATCHES[kind], {})
    assert result == {"logits": True, "worst": 0.0, "sum": True, "mean": True}


@pytest.mark.parametrize(
    "overrides",
    [
        {"n_group": 4, "topk_group": 2},
        {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
        {"tie_word_embeddings": True},
        {"attention_bias": False},
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1234.5,
                "partial_rotary_factor": 1.0,
                "mrope_section": [2, 3, 3],
            },
        },
        {"rms_norm_eps": 1e-3, "vision_rms_norm_eps": 1e-4, "first_k_dense_replace": 2},
    ],
    ids=["groups", "unnormalised", "tied", "no-qkv-bias", "full-rotary", "eps"],
)
def test_odd_configurations_are_bit_equal(overrides):
    (result,) = run(forward_case, 1, torch.float32, BATCHES["one image"], overrides)
    assert result == {"logits": True, "worst": 0.0, "sum": True, "mean": True}


def gradient_case(rank: int, kind: dict) -> dict:
    hf = tiny_glm_model(0)
    chunks, model, layout = assemble(hf)
    data = batch(2, **kind)
    _, loss = hf_sum_loss(hf, data)
    loss.backward()
    chunks[0](data).backward()
    return relative_gradients(hf, chunks, model, layout, rank)


@pytest.mark.parametrize("kind", BATCHES, ids=lambda k: k.replace(" ", "-"))
def test_gradients(kind):
    (errors,) = run(gradient_case, 1, BATCHES[kind])
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]
