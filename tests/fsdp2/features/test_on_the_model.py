"""Recompute, offload and chunked loss on the assembled model, in every kind of layout, beside text-only ranks (B07)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mm_models.fsdp2.features import offload, recompute
from mm_models.fsdp2.features.stores import SpillFileStore
from tests.fsdp2 import kit
from tests.harness import run
from tests.models import tiny_model

FEATURES = {
    "recompute": {"recomputed": True},
    "reentrant": {"recomputed": True, "use_reentrant": True},
    "offload": {"offloaded": True},
    "all": {"recomputed": True, "offloaded": True, "chunk": 7},
}


def blocks(model) -> list[str]:
    """The seeds' `recompute_plan`, resolved."""
    return [name for name in kit.plan(model) if ".blocks." in name or ".layers." in name]


def case(
    rank: int, layout: dict, recomputed=False, use_reentrant=False, offloaded=False, chunk=None, dtype="fp32",
    family="glm4v_moe",
) -> dict:  # fmt: skip
    plain = kit.build

    def build(hf, **options):
        model = plain(hf, **options)
        if recomputed:
            recompute.apply(model, blocks(model), use_reentrant=use_reentrant)
        if offloaded:
            offload.apply(model, blocks(model), SpillFileStore(), floor=1 << 10)
        model.lm_head.chunk = chunk
        return model

    kit.build = build
    policy = kit.BF16 if dtype == "bf16" else None
    model = kit.assemble(tiny_model(family), policy=policy, **layout)
    kit.build = plain
    loss = kit.backward(model, kit.mine(kit.global_batch()))
    dist.all_reduce(loss)
    return {"loss": loss, **kit.gradients(model)}


@pytest.fixture(scope="module")
def without():
    """What each layout gives without features."""
    found = {}

    def of(name: str, dtype: str) -> dict:
        if (name, dtype) not in found:
            processes, layout = kit.LAYOUTS[name]
            found[name, dtype] = run(case, processes, layout, False, False, False, None, dtype, timeout=60)[0]
        return found[name, dtype]

    return of


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    ("name", "dtype"), [("one", "fp32"), ("fsdp2", "bf16"), ("ep2", "fp32"), ("ep2-fsdp2", "bf16")]
)
def test_features_change_no_number(without, name, dtype, feature):
    """Bit by bit; the chunked loss within rounding."""
    processes, layout = kit.LAYOUTS[name]
    options = {"recomputed": False, "use_reentrant": False, "offloaded": False, "chunk": None} | FEATURES[feature]
    found, wanted = run(case, processes, layout, *options.values(), dtype, timeout=60)[0], without(name, dtype)
    assert found.keys() == wanted.keys()
    if options["chunk"] is None:
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    else:
        error, where = kit.worst(kit.relative(found, wanted))
        assert error < (1e-4 if dtype == "fp32" else 0.05), (error, where)


def test_windows_are_recomputed_and_offloaded():
    """A tower whose blocks attend to different segments, in bf16 on two ranks."""
    features = [run(case, 2, {}, on, False, on, None, "bf16", "qwen2_5_vl", timeout=60)[0] for on in (False, True)]
    assert [key for key, value in features[0].items() if not torch.equal(features[1][key], value)] == []
