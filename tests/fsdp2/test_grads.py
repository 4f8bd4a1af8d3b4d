"""Gradients over all meshes: a NaN anywhere is known everywhere, frozen parts do not count, missing ones are zero."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from mm_models.fsdp2 import grads, sharding
from tests.fsdp2 import kit
from tests.harness import run
from tests.models import tiny_glm_model

EXPERT = f"{kit.LAYERS}.2.mlp.experts.down_proj"


def nan_case(rank: int, layout: dict) -> dict:
    model = kit.assemble(tiny_glm_model(0), **layout)
    kit.backward(model, kit.mine(kit.global_batch()))
    before = grads.norm(model)
    if rank == dist.get_world_size() - 1:
        dict(model.named_parameters())[EXPERT].grad.to_local()[0, 0, 0] = float("nan")
    return {"before": before, "after": grads.norm(model), "names": grads.non_finite(model)}


@pytest.mark.parametrize("name", ["fsdp2", "ep2", "ep2-fsdp2", "hsdp2x2"])
def test_one_nan_on_one_rank_is_known_to_all(name):
    processes, layout = kit.LAYOUTS[name]
    results = run(nan_case, processes, layout, timeout=60)
    assert all(math.isfinite(result["before"]) and math.isnan(result["after"]) for result in results)
    assert [result["names"] for result in results] == [[]] * (processes - 1) + [[EXPERT]]


def missing_case(rank: int) -> dict:
    model = kit.assemble(tiny_glm_model(0), policy=sharding.Policy())
    model(kit.global_batch()[1]).backward()  # one process, no image: the tower gets no gradient
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    norm = grads.norm(model)
    grads.fill_missing(model)
    found = dict(model.named_parameters())
    return {
        "missing": missing,
        "zero": all(found[name].grad is not None and not found[name].grad.any() for name in missing),
        "norms": (norm, grads.norm(model)),
    }


def test_a_missing_gradient_becomes_zero():
    (found,) = run(missing_case, 1)
    assert found["missing"] and all(name.startswith("model.visual.") for name in found["missing"])
    assert found["zero"] and found["norms"][0] == found["norms"][1]


PARTS = {
    "tower": [f"model.visual.{name}" for name in ("blocks.0", "blocks.1", "patch_embed", "post_conv_layernorm", "embeddings",
              "downsample", "post_layernorm")],
    "projector": ["model.visual.merger"],
    "decoder": ["model.language_model", "lm_head"],
}  # fmt: skip


def freeze_case(rank: int, freeze: list[str]) -> dict:
    model = kit.assemble(tiny_glm_model(0), freeze=freeze, ep=dist.get_world_size())
    before = {name: kit.whole(p).detach().clone() for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, foreach=False)
    for _ in range(3):
        kit.backward(model, kit.mine(kit.global_batch()))
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, p in model.named_parameters() if not torch.equal(kit.whole(p).detach(), before[name])}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {"changed": changed, "frozen": frozen, "all": set(before), "state": len(optimizer.state)}


@pytest.mark.parametrize(
    "parts", [("tower",), ("projector",), ("decoder",), ("tower", "projector"), ("projector", "decoder")]
)
def test_frozen_parts_stay_and_all_others_move(parts):
    """Three AdamW steps with weight decay (field case B37)."""
    freeze = [name for part in parts for name in PARTS[part]]
    for result in run(freeze_case, 2, freeze, timeout=60):
        expected = {name for name in result["all"] if any(name.startswith(f"{prefix}.") for prefix in freeze)}
        assert result["frozen"] == expected and result["changed"] == result["all"] - expected
        assert result["state"] == len(result["all"]) - len(expected)
