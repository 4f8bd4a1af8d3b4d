"""One process, TP1: every family's assembled model against Hugging Face's own, bit by bit; gradients within rounding."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run
from tests.mcore.batches import batch, hf_inputs, hf_sum_loss
from tests.mcore.cases import assemble, relative_gradients
from tests.models import FAMILIES, tiny_model

BATCHES = {
    "one image": dict(images=[[(4, 4)]]),
    "two images": dict(images=[[(4, 6), (2, 8)]], length=48),
    "ragged windows": dict(images=[[(6, 10)], [(10, 6)]], length=48),
    "text only": dict(images=[[]]),
    "two samples": dict(images=[[(4, 4)], [(6, 4), (2, 2)]], length=48),
    "image beside text": dict(images=[[], [(4, 4)]]),
    "padded": dict(images=[[(4, 4)], [(4, 6)]], length=48),
}
EXACT = {"logits": True, "worst": 0.0, "sum": True, "mean": True}


def data_of(kind: str, seed: int) -> dict:
    made = batch(seed, **BATCHES[kind])
    if kind == "padded":
        made["attention_mask"][0, -7:] = 0
        made["labels"][0, -7:] = -100
    return made


def compare(hf, dtype: torch.dtype, kind: str) -> dict:
    """Logits and losses of both models on one batch."""
    chunks, _, _ = assemble(hf, dtype=dtype)
    data = data_of(kind, 1)
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


def forward_case(rank: int, family: str, dtype: torch.dtype) -> dict:
    hf = tiny_model(family, 0, dtype)
    return {kind: compare(hf, dtype, kind) for kind in BATCHES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_is_bit_equal(family, dtype):
    (result,) = run(forward_case, 1, family, dtype)
    assert result == dict.fromkeys(BATCHES, EXACT)


def rope(theta: float, sections: list[int], partial: float = 1.0) -> dict:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": partial,
            "mrope_section": sections,
        }
    }


VISION = {"vision-theta": {"vision_rope_parameters": {"rope_type": "axial", "rope_theta": 77.0}}}
GLM_VISION = VISION | {
    "vision-eps": {"vision_rms_norm_eps": 1e-4},
    "image-size": {"image_size": 84},
    "patch-size": {"patch_size": 7, "image_size": 28},
    "temporal-patch-size": {"temporal_patch_size": 1},
    "merger-width": {"vision_intermediate_size": 36},
    "vision-heads": {"num_heads": 2},
}
QWEN = VISION | {
    "theta": rope(1234.5, [2, 3, 3]),
    "sections": rope(1e6, [1, 7, 0]),
    "eps": {"rms_norm_eps": 1e-3},
    "heads": {"num_attention_heads": 2, "num_key_value_heads": 1, **rope(1e6, [4, 6, 6])},
    "one-query-a-group": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "vocabulary": {"vocab_size": 331},
    "patch-size": {"patch_size": 7},
    "temporal-patch-size": {"temporal_patch_size": 1},
    "vision-heads": {"num_heads": 2},
    "vision-depth": {"depth": 3},
}
ODD = {
    "glm4v_moe": GLM_VISION
    | {
        "groups": {"n_group": 4, "topk_group": 2},
        "unnormalised": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
        "tied": {"tie_word_embeddings": True},
        "no-qkv-bias": {"attention_bias": False},
        "full-rotary": {"num_key_value_heads": 4, "head_dim": 16, **rope(1234.5, [2, 3, 3])},
        "eps": {"rms_norm_eps": 1e-3, "first_k_dense_replace": 2},
    },
    "glm4v": GLM_VISION
    | {
        "theta": rope(1234.5, [1, 1, 2], 0.5),
        "sections": rope(1e4, [0, 3, 1], 0.5),
        "full-rotary": rope(1e4, [2, 3, 3]),
        "eps": {"rms_norm_eps": 1e-3},
        "heads": {"num_attention_heads": 2, "num_key_value_heads": 1, **rope(1e4, [2, 3, 3], 0.5)},
        "tied": {"tie_word_embeddings": True},
        "vocabulary": {"vocab_size": 331},
    },
    "qwen2_vl": QWEN | {"mlp-ratio": {"mlp_ratio": 2}},
    "qwen2_5_vl": QWEN
    | {
        "window-of-one-token": {"window_size": 28},
        "window-no-multiple": {"window_size": 100},
        "window-past-the-image": {"window_size": 448},
        "never-whole": {"fullatt_block_indexes": []},
        "always-whole": {"fullatt_block_indexes": [0, 1, 2, 3]},
        "whole-at-odd-places": {"fullatt_block_indexes": [2, 0]},
        "merge-of-one": {"spatial_merge_size": 1},
        "vision-width": {"vision_intermediate_size": 40},
        "vision-depth": {"depth": 5, "fullatt_block_indexes": [4]},
    },
}


def odd_case(rank: int, family: str) -> dict:
    found = {}
    for name, overrides in ODD[family].items():
        hf, usual = tiny_model(family, 0, **overrides), tiny_model(family, 0)
        patch, frames, merge = (
            getattr(hf.config.vision_config, key) for key in ("patch_size", "temporal_patch_size", "spatial_merge_size")
        )
        chunks, _, _ = assemble(hf)
        grids = [[(6, 10)], [(4, 4), (2, 2)]] if merge == 2 else [[(3, 5)], [(2, 2), (1, 1)]]
        data = batch(1, images=grids, length=48, features=3 * frames * patch**2, merge=merge)
        with torch.no_grad():
            loss = hf_sum_loss(hf, data)[1]
            found[name] = torch.equal(chunks[0](data), loss)
            shapes = [p.shape for p in hf.parameters()] == [p.shape for p in usual.parameters()]
            if shapes and merge == 2:
                found[name] = found[name] and not torch.equal(hf_sum_loss(usual, data)[1], loss)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_configurations(family):
    """One field at a time: Hugging Face's loss, bit by bit, and another one than without the change."""
    (found,) = run(odd_case, 1, family, timeout=90)
    assert found == dict.fromkeys(ODD[family], True)


def gradient_case(rank: int, family: str) -> dict:
    worst = {}
    for kind in BATCHES:
        hf = tiny_model(family)
        chunks, model, layout = assemble(hf)
        data = data_of(kind, 2)
        _, loss = hf_sum_loss(hf, data)
        loss.backward()
        chunks[0](data).backward()
        for name, error in relative_gradients(hf, chunks, model, layout, rank).items():
            worst[f"{kind}: {name}"] = error
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family):
    (errors,) = run(gradient_case, 1, family, timeout=60)
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]
