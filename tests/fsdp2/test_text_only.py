"""A rank without an image beside a rank with one: nothing hangs, and the numbers are those of one process (field case B07)."""

from __future__ import annotations

import pytest
import torch

from mm_models.fsdp2 import grads, sharding
from tests.fsdp2 import kit
from tests.harness import run
from tests.mcore.batches import batch
from tests.models import tiny_model

IMAGE, TEXT = [[(4, 4)]], [[]]
MIXES = {
    "one step, mixed": [[IMAGE, TEXT]],
    "one step, mixed the other way": [[TEXT, IMAGE]],
    "all text": [[TEXT, TEXT]],
    "two, text first on one": [[IMAGE, TEXT], [IMAGE, IMAGE]],
    "two, text last on one": [[IMAGE, IMAGE], [IMAGE, TEXT]],
    "two, all text but the last": [[TEXT, TEXT], [TEXT, IMAGE]],
}
"""Micro-batch -> rank -> images."""

FROZEN = {
    "trained": [],
    "tower frozen": ["model.visual"],
    "projector trained": ["model.visual.blocks.0", "model.visual.blocks.1", "model.visual.patch_embed", "model.visual.embeddings",
                          "model.visual.post_conv_layernorm", "model.visual.post_layernorm", "model.visual.downsample"],
    "tower alone": ["model.language_model", "lm_head"],
}  # fmt: skip


def case(rank: int, mix: list, freeze: list[str], layout: dict, recompute: bool, family: str = "glm4v_moe") -> dict:
    from torch.utils.checkpoint import checkpoint

    hf = tiny_model(family)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix + ".") for prefix in freeze))
    data = [batch(50 + 2 * at + r, images=kind) for at, ranks in enumerate(mix) for r, kind in enumerate(ranks)]
    trained = any(p.requires_grad for p in hf.model.language_model.parameters())
    loss, expected, norm = kit.reference(hf, data if trained else [d for d in data if "pixel_values" in d])
    if not trained:
        with torch.no_grad():
            loss = sum(kit.hf_sum_loss(hf, part)[1].item() for part in data)
    model = kit.assemble(hf, freeze=freeze, policy=sharding.Policy(backward_prefetch=1), **layout)
    if recompute:
        for block in (*model.model.visual.blocks, *model.model.language_model.layers):
            block.forward = _recomputed(checkpoint, block.forward)
    total = kit.backward(model, kit.mine(data))
    torch.distributed.all_reduce(total)
    return {
        "loss": abs(total.item() - loss) / loss,
        "gradient": kit.worst(kit.relative(kit.gradients(model), expected)),
        "norm": abs(grads.norm(model) - norm) / norm,
        "frozen": all(p.grad is None for p in model.parameters() if not p.requires_grad),
    }


def _recomputed(checkpoint, forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def check(results: list[dict]) -> None:
    for result in results:
        assert result["loss"] < 1e-6 and result["norm"] < 1e-5 and result["gradient"][0] < 1e-4, result
        assert result["frozen"]


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix(mix):
    check(run(case, 2, MIXES[mix], [], {}, False, timeout=60))


@pytest.mark.parametrize("freeze", [name for name in FROZEN if FROZEN[name]])
@pytest.mark.parametrize("mix", ["one step, mixed", "two, text last on one"])
def test_with_frozen_parts(mix, freeze):
    """A frozen part is not counted in the norm either: the reference has no gradient for it."""
    check(run(case, 2, MIXES[mix], FROZEN[freeze], {}, False, timeout=60))


@pytest.mark.parametrize("freeze", ["trained", "tower frozen"])
@pytest.mark.parametrize("mix", ["one step, mixed", "two, text first on one"])
def test_with_recompute(mix, freeze):
    check(run(case, 2, MIXES[mix], FROZEN[freeze], {}, True, timeout=60))


@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep_plan": False, "fsdp_plan": []}], ids=["ep2", "root alone"])
def test_in_other_layouts(layout):
    check(run(case, 2, MIXES["two, text last on one"], [], layout, False, timeout=60))


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["all text", "two, text first on one", "two, text last on one"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "glm4v"])
def test_every_family(family, mix):
    """The tower frozen: it runs all the same on a blank image, whose windows are ragged by themselves."""
    for freeze in ("trained", "tower frozen"):
        check(run(case, 2, MIXES[mix], FROZEN[freeze], {}, True, family, timeout=60))
