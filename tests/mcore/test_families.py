"""Qwen2-VL, Qwen2.5-VL and GLM-4.1V on real processes: logits and losses bit-equal to Hugging Face without TP, within 1e-5 with it;
the gradient of every tensor on every rank. GLM-4.5V's topologies stand in `test_bit_equal` and `test_topologies`.

Splits cut Qwen2.5-VL's tower between window and whole-frame layers in every way: what a layer attends to is said by its index in
the model, not by its place on a stage. A part of each kind runs always, the rest is marked slow.
"""

from __future__ import annotations

import pytest
import torch

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.mcore.layers import Recompute
from tests.harness import run
from tests.mcore import test_bit_equal, test_topologies
from tests.mcore.oracle import model_config
from tests.models import tiny_config

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "glm4v")

SPLITS = {
    # name: (processes, layers of the tower where it has two, where it has four, of the decoder, degrees)
    "pp2": (2, [1, 1], [2, 2], [0, 4], dict(pp=2)),
    "pp2-uneven": (2, [0, 2], [3, 1], [0, 4], dict(pp=2)),
    "pp2-tower-first": (2, [2, 0], [4, 0], [1, 3], dict(pp=2)),
    "pp4": (4, [1, 0, 1, 0], [1, 2, 1, 0], [0, 0, 1, 3], dict(pp=4)),
    "pp4-head-only": (4, [0, 2, 0, 0], [0, 1, 3, 0], [0, 0, 4, 0], dict(pp=4)),
    "pp2-vpp2": (2, [[1, 0], [1, 0]], [[1, 1], [1, 1]], [[0, 0], [0, 4]], dict(pp=2, vpp=2)),
    "pp2-vpp2-tower-first": (2, [[1, 1], [0, 0]], [[3, 1], [0, 0]], [[0, 2], [1, 1]], dict(pp=2, vpp=2)),
    "dp2": (2, [2], [4], [4], dict()),
}
# Each kv head on a rank of its own at TP4.
WIDE = {"num_key_value_heads": 4}
SPLIT_WIDTHS = {
    # name: (processes, whether each TP rank needs a kv head of its own, splits, degrees)
    "tp2": (2, False, "whole", dict(tp=2)),
    "tp2-sp": (2, False, "whole", dict(tp=2, sequence_parallel=True)),
    "tp4": (4, True, "whole", dict(tp=4)),
    "tp4-sp": (4, True, "whole", dict(tp=4, sequence_parallel=True)),
    "tp2-sp-pp2": (4, False, "pp2", dict(tp=2, pp=2, sequence_parallel=True)),
    "tp2-pp2-uneven": (4, False, "pp2-uneven", dict(tp=2, pp=2)),
}


def split_of(family: str, name: str) -> dict:
    _, two, four, text, _ = SPLITS[name]
    return {"vision_layers": four if family == "qwen2_5_vl" else two, "text_layers": text}


def marked(names) -> list:
    """Every family on every topology; what is not marked slow is the hardest split, and TP with sequence parallel."""
    return [
        pytest.param(family, name, marks=[] if name in ("pp2-vpp2", "tp2-sp") else [pytest.mark.slow])
        for family in FAMILIES
        for name in names
    ]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("family,name", marked(SPLITS))
def test_logits_are_bit_equal(family, name, dtype):
    results = run(
        test_bit_equal.case, SPLITS[name][0], dtype, split_of(family, name), SPLITS[name][-1], family, timeout=60
    )
    assert any(result["count"] for result in results)
    assert all(result["equal"] for result in results), results


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SPLIT_WIDTHS)
def test_logits_with_tensor_parallel(family, name):
    processes, wide, split, degrees = SPLIT_WIDTHS[name]
    split = {} if split == "whole" else split_of(family, split)
    overrides = WIDE if wide else {}
    results = run(test_bit_equal.case, processes, torch.float32, split, degrees, family, overrides, timeout=60)
    assert any(result["count"] for result in results)
    assert max(result["worst"] for result in results) <= 1e-5, results


def gradients(family: str, name: str, **more) -> None:
    """One step on a topology of either table, every gradient held to Hugging Face's."""
    if name in SPLITS:
        processes, split, degrees = SPLITS[name][0], split_of(family, name), SPLITS[name][-1]
    else:
        processes, wide, split, degrees = SPLIT_WIDTHS[name]
        split = {} if split == "whole" else split_of(family, split)
        more["overrides"] = (WIDE if wide else {}) | more.get("overrides", {})
    more |= {"family": family}
    test_topologies.check(run(test_topologies.kwargs_case, processes, 4, split, degrees, more, timeout=60))


@pytest.mark.parametrize("family,name", marked((*SPLITS, *SPLIT_WIDTHS)))
def test_gradients_of_every_rank(family, name):
    gradients(family, name)


FREEZE = {
    "image_encoder__vision_encoder__freeze": ["patch_embed", "blocks.layers.0.*"],
    "image_encoder__vision_projector__freeze": True,
    "text_decoder__freeze": ["decoder.layers.*.mlp.*"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "more",
    [
        {"extra": FREEZE},
        {"recompute": Recompute(granularity="full")},
        {"recompute": Recompute(granularity="selective")},
        {"overrides": {"tie_word_embeddings": True}},
        {"local": True},
        {"texts": (0, 1, 2, 3)},
    ],
    ids=["frozen", "recompute-full", "recompute-selective", "tied", "local", "text-only"],
)
@pytest.mark.parametrize("name", ["pp2-vpp2", "tp2-sp-pp2"])
def test_ways_to_train(family, name, more):
    gradients(family, name, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_kv_heads_than_ranks_are_refused(family):
    model = model_config(tiny_config(family))
    with pytest.raises(UserError, match=r"text_decoder\.num_query_groups \(kv heads\) 2 does not divide by tp 4"):
        model.check_layout(ParallelLayout(tp=4))


def test_a_tower_mlp_that_does_not_divide_is_refused():
    model = model_config(tiny_config("qwen2_5_vl", vision_intermediate_size=50))  # as 3420 at TP8
    with pytest.raises(UserError, match=r"vision_encoder\.ffn_hidden_size 50 does not divide by tp 4"):
        model.check_layout(ParallelLayout(tp=4))
