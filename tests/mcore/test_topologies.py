"""Every topology on real processes against Hugging Face in one: losses, and the gradient of every tensor on every rank.

"It ran" is never evidence: core's own interleaved schedule ends normally with wrong gradients under its default flags.
"""

from __future__ import annotations

import pytest

from mm_models.mcore.layers import Recompute
from tests.harness import run
from tests.mcore.batches import batch, hf_sum_loss
from tests.mcore.cases import assemble, relative_gradients, train_step, wrap
from tests.models import tiny_model

ONE, TWO, TEXT = [[(4, 4)]], [[(4, 6), (2, 8)]], [[]]


def micro_batches(count: int) -> list[dict]:
    """`count` micro-batches of different lengths and image shapes, one of three without an image."""
    kinds = [(ONE, 40), (TEXT, 32), (TWO, 48), ([[(2, 2)]], 24)]
    return [batch(10 + i, images=kinds[i % 4][0], length=kinds[i % 4][1]) for i in range(count)]


def case(
    rank: int,
    count: int,
    split: dict,
    degrees: dict,
    *,
    family: str = "glm4v_moe",
    overrides: dict | None = None,
    extra: dict | None = None,
    recompute: Recompute | None = None,
    texts: tuple[int, ...] = (),
    crowd: bool = False,
    local: bool = False,
) -> dict:
    """One step on this rank against Hugging Face. `texts`: micro-batches made text-only; `crowd`: every token goes to experts 0 and 1."""
    hf = tiny_model(family, 0, **(overrides or {}))
    if crowd:
        for layer in hf.model.language_model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias[:2] += 100.0
    chunks, model, layout = assemble(hf, split=split, extra=extra, **degrees)
    for chunk in chunks:
        chunk.set_recompute(recompute or Recompute())
    chunks = wrap(chunks, local=local)
    everything = micro_batches(count)
    for at in texts:
        everything[at] = batch(50 + at, images=TEXT, length=32)
    losses = []
    for data in everything:  # the reference: Hugging Face, one process, all micro-batches of all data-parallel ranks
        _, loss = hf_sum_loss(hf, data)
        loss.backward()
        losses.append(loss.item())
    dp = layout.coords(rank).dp
    mine = everything[dp :: layout.dp]
    got = train_step(chunks, mine, layout)
    return {
        "errors": relative_gradients(hf, [chunk.module for chunk in chunks], model, layout, rank),
        "losses": [loss.item() for loss in got],
        "expected": losses[dp :: layout.dp],
    }


TOPOLOGIES = {
    # name: (processes, micro-batches, split, degrees)
    "tp2": (2, 3, {}, dict(tp=2, sequence_parallel=True)),
    "dp2": (2, 4, {}, dict()),
    "pp2-vit20-llm22": (2, 4, dict(vision_layers=[2, 0], text_layers=[2, 2]), dict(pp=2)),
    "pp2-vit11-llm04": (2, 4, dict(vision_layers=[1, 1], text_layers=[0, 4]), dict(pp=2)),
    "pp2-head-only": (2, 4, dict(vision_layers=[2, 0], text_layers=[4, 0]), dict(pp=2)),
    "pp2-vit-starts-late": (2, 4, dict(vision_layers=[0, 2], text_layers=[0, 4]), dict(pp=2)),
    "pp2-vpp2": (2, 4, dict(vision_layers=[[2, 0], [0, 0]], text_layers=[[0, 2], [1, 1]]), dict(pp=2, vpp=2)),
    "pp2-vpp2-gap": (2, 4, dict(vision_layers=[[1, 1], [0, 0]], text_layers=[[0, 0], [0, 4]]), dict(pp=2, vpp=2)),
    "pp2-vpp2-late-vit-head-only": (
        2,
        4,
        dict(vision_layers=[[0, 1], [1, 0]], text_layers=[[0, 0], [4, 0]]),
        dict(pp=2, vpp=2),
    ),
    "ep2": (2, 4, {}, dict(ep=2)),
    "etp2": (2, 4, {}, dict(etp=2)),
    "tp2-ep2-etp1": (2, 3, {}, dict(tp=2, ep=2, etp=1, sequence_parallel=True)),
    "pp4-gap-head-only": (4, 4, dict(vision_layers=[0, 2, 0, 0], text_layers=[0, 0, 4, 0]), dict(pp=4)),
    "pp4-gap": (4, 4, dict(vision_layers=[2, 0, 0, 0], text_layers=[0, 0, 2, 2]), dict(pp=4)),
    "pp4-vpp2": (
        4,
        4,
        dict(vision_layers=[[1, 1, 0, 0], [0, 0, 0, 0]], text_layers=[[0, 0, 1, 1], [0, 1, 0, 1]]),
        dict(pp=4, vpp=2),
    ),
    "tp2-pp2": (4, 4, dict(vision_layers=[1, 1], text_layers=[0, 4]), dict(tp=2, pp=2, sequence_parallel=True)),
    "tp2-dp2-ep2": (4, 4, {}, dict(tp=2, ep=2, sequence_parallel=True)),
    "tp2-dp2-ep2-etp1": (4, 4, {}, dict(tp=2, ep=2, etp=1, sequence_parallel=True)),
    "tp2-dp2-ep4-etp1": (4, 4, {}, dict(tp=2, ep=4, etp=1, sequence_parallel=True)),
    "dp4-ep2-etp2": (4, 4, {}, dict(ep=2, etp=2)),
    "pp2-ep2": (4, 4, dict(vision_layers=[2, 0], text_layers=[1, 3]), dict(pp=2, ep=2)),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_gradients_of_every_rank(name):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(case, processes, count, split, degrees, timeout=60))


@pytest.mark.parametrize("texts", [(0,), (1, 3), (2,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "pp2-vit11-llm04",
        "pp2-vit-starts-late",
        "pp4-gap-head-only",
        "pp2-vpp2-gap",
        "pp2-vpp2-late-vit-head-only",
        "dp2",
    ],
)
def test_text_only_micro_batches_in_every_position(name, texts):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(kwargs_case, processes, count, split, degrees, {"texts": texts}, timeout=60))


FREEZES = {
    "vision": {"image_encoder__vision_encoder__freeze": True, "image_encoder__vision_projector__freeze": True},
    "text": {"text_decoder__freeze": True},
    "some": {
        "image_encoder__vision_encoder__freeze": ["patch_embed", "blocks.layers.0.*"],
        "text_decoder__freeze": ["embedding.*", "decoder.layers.*.mlp.experts.*"],
    },
}


@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("name", ["pp2-vit11-llm04", "pp2-vpp2", "ep2"])
def test_frozen_parts(name, freeze):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(kwargs_case, processes, count, split, degrees, {"extra": FREEZES[freeze]}, timeout=60))


@pytest.mark.parametrize(
    "recompute",
    [Recompute(granularity="full"), Recompute(granularity="full", layers=1), Recompute(granularity="selective")],
    ids=str,
)
@pytest.mark.parametrize("name", ["pp2-vit11-llm04", "tp2-ep2-etp1", "pp2-vpp2"])
def test_recompute(name, recompute):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(kwargs_case, processes, count, split, degrees, {"recompute": recompute}, timeout=60))


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2-head-only", "pp2-vit11-llm04", "pp2-vpp2", "tp2-pp2"])
def test_tied_embeddings(name):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(kwargs_case, processes, count, split, degrees, {"overrides": {"tie_word_embeddings": True}}, timeout=60))


@pytest.mark.parametrize("name", ["ep2", "tp2-ep2-etp1", "tp2-dp2-ep4-etp1", "dp4-ep2-etp2"])
def test_ranks_whose_experts_get_no_token(name):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(kwargs_case, processes, count, split, degrees, {"crowd": True}, timeout=60))


@pytest.mark.parametrize("name", ["tp2", "pp2-vit11-llm04", "pp2-vpp2-gap", "tp2-ep2-etp1"])
def test_gradients_without_data_parallel_buffers(name):
    processes, count, split, degrees = TOPOLOGIES[name]
    check(run(kwargs_case, processes, count, split, degrees, {"local": True}, timeout=60))


def kwargs_case(rank: int, count: int, split: dict, degrees: dict, more: dict) -> dict:
    return case(rank, count, split, degrees, **more)


def check(results: list[dict]) -> None:
    worst = {}
    for rank, result in enumerate(results):
        for tensor, error in result["errors"].items():
            worst[f"rank {rank} {tensor}"] = error
        for got, expected in zip(result["losses"], result["expected"]):
            assert got == pytest.approx(expected, rel=1e-5)
    assert any(result["losses"] for result in results)
    bad = sorted((item for item in worst.items() if not item[1] <= 1e-4), key=lambda item: -item[1])
    assert not bad, bad[:8]
