"""Loss scale, empty batches, non-finite values and freezing: what one step does, in numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mm_models.train import batches
from mm_models.weights.manifest import open_checkpoint
from tests.harness import CaseFailed, run
from tests.mcore.test_training import DISTRIBUTED, SP, agree, topology
from tests.mcore.training_kit import Synthetic, launch, launch_synthetic, printed, reference, tiny_flags, world  # noqa: F401


def test_the_two_loss_modes_by_hand():
    """3 and 9 labelled tokens, sums 6.0 and 9.0: 1.25 by token, 1.5 by micro-batch, however they are spread."""
    sums, counts = torch.tensor([6.0, 9.0]), [3, 9]
    for tokens, parts, expected in (([12, 12], 1, 1.25), (counts, 2, 1.5)):
        micro = [batches.MicroBatch(index=i, data={}, tokens=n, parts=parts) for i, n in enumerate(tokens)]
        assert sum(m.loss(s) for m, s in zip(micro, sums)).item() == expected


@pytest.mark.parametrize("mode", ["default", "per_token_loss"])
def test_both_modes_equal_hugging_face_however_the_batch_is_cut(mode, world, tmp_path):  # noqa: F811
    """One sample a micro-batch and two; accumulated on one rank or spread over two. By token, the cut does not matter.

    The rate is small: at 1e-3 AdamW turns a gradient of 1e-9, which is rounding, into a step that flips one token's expert.
    """
    model = world.model(mode, loss_cfg={"loss_type": mode})
    expected = {micro: reference(world, steps=2, micro=micro, loss_type=mode, rate=1e-4)["records"] for micro in (1, 2)}
    same = expected[1][0]["loss"] == pytest.approx(expected[2][0]["loss"], rel=1e-5)
    assert same == (mode == "per_token_loss")
    for name, nprocs, micro, flags in (
        ("acc", 1, 1, []),
        ("two", 1, 2, []),
        ("dp2", 2, 2, [DISTRIBUTED]),
        ("pp2", 2, 1, topology(pp=2)),
    ):
        records = launch(
            nprocs, world.flags(*flags, steps=2, micro=micro, model=model, rate=1e-4), tmp_path / f"{name}.jsonl"
        )
        agree(records, expected[micro])


def first_moments(folder: Path) -> dict[str, torch.Tensor]:
    """exp_avg after one step, that is a tenth of the clipped gradient, whole, by name (one model-parallel rank)."""
    whole: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "iter_0000001").glob("*/optim_dp*.pt")):
        for name, entry in torch.load(file, weights_only=True)["params"].items():
            size = torch.Size(entry["shape"]).numel()
            whole.setdefault(name, torch.zeros(size))[slice(*entry["range"])] = entry["exp_avg"]
    return whole


EMPTY = {
    "one of two data-parallel ranks": (2, [], (1, 5)),
    "the same, sharded optimizer": (2, [DISTRIBUTED], (1, 5)),
    "one micro-batch of a window": (1, [], (1, 5, 2, 4)),
    "the last stage": (2, topology(pp=2), (5, 1, 2, 4)),
    "the last stage, interleaved": (2, topology(pp=2, vpp=2), (5, 1, 2, 4)),
    "under tensor parallelism": (2, [*topology(tp=2), SP], (1, 2, 4, 5)),
}


@pytest.mark.parametrize("mode", ["default", "per_token_loss"])
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_micro_batch_is_left_out(name, mode, tmp_path):
    """Loss and gradients are those of the other samples alone, on one process."""
    nprocs, flags, order = EMPTY[name]
    others = tuple(id for id in order if id != 5)
    common = dict(steps=1, loss_cfg={"loss_type": mode})
    alone = tiny_flags(tmp_path, "--from-scratch", "--save", str(tmp_path / "a"), batch=len(others), **common)
    with_it = tiny_flags(tmp_path, *flags, "--from-scratch", "--save", str(tmp_path / "b"), batch=len(order), **common)
    (want,) = launch_synthetic(1, alone, tmp_path / "a.jsonl", Synthetic(order=others))
    (got,) = launch_synthetic(nprocs, with_it, tmp_path / "b.jsonl", Synthetic(order=order, unlabelled=frozenset({5})))
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5) and got["grad_norm"] == pytest.approx(
        want["grad_norm"], rel=1e-4
    )
    assert got["labelled_tokens"] == want["labelled_tokens"]
    if "--tensor-model-parallel-size" in flags or "--pipeline-model-parallel-size" in flags:
        return
    moments, expected = first_moments(tmp_path / "b"), first_moments(tmp_path / "a")
    assert moments.keys() == expected.keys()
    for key, value in expected.items():
        assert (moments[key] - value).norm() <= 1e-4 * max(value.norm(), 1e-7), key


@pytest.mark.parametrize(
    "nprocs, flags", [(2, []), (2, topology(pp=2)), (2, topology(pp=2, vpp=2)), (2, [*topology(tp=2), SP])]
)
def test_an_all_empty_step_changes_nothing_and_hangs_nobody(nprocs, flags, tmp_path):
    """Step 2 has no label anywhere; weight decay 0: weights after it are those before it, bit for bit."""
    order = (1, 2, 4, 7, 5, 6, 8, 9, 10, 11, 13, 14)
    provider = Synthetic(order=order, unlabelled=frozenset({5, 6, 8, 9}))
    argv = tiny_flags(
        tmp_path,
        *flags,
        "--from-scratch",
        "--weight-decay",
        "0",
        "--save",
        str(tmp_path / "ck"),
        "--save-interval",
        "1",
        steps=3,
    )
    said = printed(nprocs, [*argv, "--log-metrics", str(tmp_path / "m.jsonl")], provider)
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [r["skipped"] for r in records] == [0, 1, 0] and records[1]["loss"] is None and records[2]["loss"] > 0
    assert records[1]["consumed_samples"] == 8
    assert "WARNING step 2: no labelled token in the whole global batch, step skipped; samples [5, 6, 8, 9]" in said[0]
    line = next(line for line in said[-1].splitlines() if "iteration        2/" in line)
    assert "lm loss" not in line and "number of skipped iterations:   1 |" in line
    before, after, later = (
        {(e.name, e.file): e.crc32 for e in open_checkpoint(tmp_path / "ck", step).manifest.tensors}
        for step in (1, 2, 3)
    )
    assert before == after != later


@pytest.mark.parametrize(
    "nprocs, flags, rank",
    [(1, [], 0), (2, [], 1), (2, [DISTRIBUTED], 0), (2, topology(pp=2), 0), (2, topology(ep=2), 1)],
)
def test_a_nan_stops_every_rank_with_step_and_place(nprocs, flags, rank, tmp_path):
    """Rank `rank` sees a NaN in step 2; nobody goes on, and the checkpoint of step 1 is the last."""
    argv = tiny_flags(
        tmp_path, *flags, "--from-scratch", "--save", str(tmp_path / "ck"), "--save-interval", "1", steps=4
    )
    with pytest.raises(CaseFailed) as caught:
        launch_synthetic(nprocs, argv, tmp_path / "m.jsonl", Synthetic(order=(1, 2, 4, 5) * 4, poison=(2, rank)))
    message = str(caught.value)
    assert message.count("NonFinite: step 2: loss") == nprocs, message
    assert re.search(r"Non-finite gradients on rank \d+: (image_encoder|text_decoder)\.", message)
    assert open_checkpoint(tmp_path / "ck").manifest.iteration == 1


PARTS = {
    "vision_encoder": "image_encoder.encoder.",
    "vision_projector": "image_encoder.projector.",
    "text_decoder": "text_decoder.",
}
FROZEN = [
    (),
    ("vision_encoder",),
    ("vision_projector",),
    ("text_decoder",),
    ("vision_encoder", "vision_projector"),
    ("vision_encoder", "text_decoder"),
]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda parts: "+".join(parts) or "none")
def test_frozen_stays_and_the_rest_moves(frozen, tmp_path):
    nprocs, flags = (2, topology(pp=2)) if frozen else (1, [])
    sections = {part: {"freeze": part in frozen} for part in PARTS}
    argv = tiny_flags(
        tmp_path,
        *flags,
        "--from-scratch",
        "--weight-decay",
        "0.1",
        "--save",
        str(tmp_path / "ck"),
        "--save-interval",
        "1",
        steps=3,
        **sections,
    )
    said = printed(nprocs, argv)
    first, last = (open_checkpoint(tmp_path / "ck", step).manifest for step in (1, 3))
    before, after = ({e.name: e.crc32 for e in manifest.tensors} for manifest in (first, last))
    stepped = {moment.name for moment in last.optimizer}
    for name in before:
        still = name.endswith("e_score_correction_bias") or any(name.startswith(PARTS[part]) for part in frozen)
        assert (before[name] == after[name]) == still, name
        assert (name in stepped) != still, name
    listed = int(re.search(r"frozen: (\d+) parameters", said[0])[1])
    assert listed == sum(
        any(name.startswith(PARTS[part]) for part in frozen)
        for name in before
        if not name.endswith("e_score_correction_bias")
    )


def test_freeze_patterns_and_the_default_are_printed(tmp_path):
    sections = {"vision_encoder": {"freeze": None}, "text_decoder": {"freeze": ["embedding", "decoder.layers.0.*"]}}
    (said,) = printed(1, tiny_flags(tmp_path, "--from-scratch", steps=1, **sections))
    assert "freeze vision_encoder: True (the default; model.json does not say)" in said
    assert (
        "\n  text_decoder.embedding.word_embeddings.weight" in said
        and "\n  text_decoder.decoder.layers.0.mlp.linear_fc1.weight" in said
    )
    assert (
        "\n  text_decoder.decoder.layers.1.mlp.router.weight"
        not in said.partition("frozen:")[2].partition("weight decay")[0]
    )


def test_all_frozen_and_a_pattern_that_matches_nothing_are_refused(tmp_path):
    with pytest.raises(CaseFailed, match="every parameter is frozen"):
        launch_synthetic(
            1,
            tiny_flags(tmp_path, "--from-scratch", **{part: {"freeze": True} for part in PARTS}),
            tmp_path / "m.jsonl",
        )
    with pytest.raises(CaseFailed, match="pattern 'embeding' matches no parameter"):
        launch_synthetic(
            1, tiny_flags(tmp_path, "--from-scratch", text_decoder={"freeze": ["embeding"]}), tmp_path / "m.jsonl"
        )


def _other_samples(rank: int) -> None:
    from mm_models import device

    device.prepare()
    batches.check_same_samples([1, 2], group=torch.distributed.group.WORLD, device=torch.device("cpu"), step=1)
    batches.check_same_samples([3, 4 + rank], group=torch.distributed.group.WORLD, device=torch.device("cpu"), step=2)


def test_ranks_with_different_samples_are_stopped():
    with pytest.raises(CaseFailed, match=r"step 2: .*rank 0: \[3, 4\]; rank 1: \[3, 5\]"):
        run(_other_samples, 2)
