"""Saving and resuming: exact to the bit, at another DP and another topology, and nothing that is wrong goes unnoticed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from mm_models.train.log import read_metrics
from mm_models.weights.manifest import open_checkpoint
from tests.harness import CaseFailed, run
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import Synthetic, launch_synthetic, tiny_flags, train_synthetic

EXACT = (
    "iteration",
    "consumed_samples",
    "learning_rate",
    "next_learning_rate",
    "loss",
    "grad_norm",
    "tokens",
    "labelled_tokens",
)
SCHEDULE = ("--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--min-lr", "1e-5", "--weight-decay", "0.1")


def exact(records: list[dict]) -> list[tuple]:
    return [tuple(record[key] for key in EXACT) for record in records]


def crcs(folder: Path, step: int) -> dict:
    """Every tensor and moment of a checkpoint, by place, with its CRC."""
    manifest = open_checkpoint(folder, step).manifest
    found = {(e.file, e.container, e.key): e.crc32 for e in manifest.tensors}
    return found | {(m.file, m.name, m.part, m.range): m.crc32 for m in manifest.optimizer}


CASES = {
    "tp1": (1, topology()),
    "tp1-bf16": (1, ["--bf16"]),
    "dp2": (2, topology()),
    "dp2-distributed-bf16": (2, [DISTRIBUTED, "--bf16"]),
    "pp2-vpp2": (2, topology(pp=2, vpp=2)),
    "ep2-distributed": (2, [*topology(ep=2), DISTRIBUTED]),
    "tp2-etp1-ep2-pp2": (4, [*topology(tp=2, etp=1, ep=2, pp=2), SP]),
    "tp2-etp1-dp2-distributed": (4, [*topology(tp=2, etp=1), SP, DISTRIBUTED]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(name, tmp_path):
    nprocs, flags = CASES[name]
    argv = tiny_flags(tmp_path, *flags, *SCHEDULE, steps=6)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = launch_synthetic(
        nprocs, [*argv, "--from-scratch", "--save", str(whole), "--save-interval", "3"], tmp_path / "a.jsonl"
    )
    resumed = launch_synthetic(
        nprocs, [*argv, "--load", str(whole), "--ckpt-step", "3", "--save", str(broken)], tmp_path / "b.jsonl"
    )
    assert [r["iteration"] for r in resumed] == [4, 5, 6]
    assert exact(resumed) == exact(unbroken[3:])
    assert crcs(broken, 6) == crcs(whole, 6)
    assert {child.name for child in broken.iterdir()} == {"iter_0000006", "latest_checkpointed_iteration.txt"}
    for file in whole.glob("iter_*/*/*.pt"):  # plain data only
        torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "before, after",
    [
        ((2, [DISTRIBUTED]), (1, [])),
        ((1, []), (2, [DISTRIBUTED])),
        ((2, []), (2, [DISTRIBUTED])),
        ((4, [*topology(ep=2), DISTRIBUTED]), (2, topology(ep=2))),
    ],
    ids=["dp2-dp1", "dp1-dp2", "plain-distributed", "ep2-dp4-dp2"],
)
def test_dp_and_the_kind_of_optimizer_may_change(before, after, tmp_path):
    argv = tiny_flags(tmp_path, *SCHEDULE, steps=5)
    (nprocs, flags), (others, other_flags) = before, after
    whole = launch_synthetic(
        nprocs,
        [*argv, *flags, "--from-scratch", "--save", str(tmp_path / "ck"), "--save-interval", "3"],
        tmp_path / "a.jsonl",
    )
    resumed = launch_synthetic(
        others, [*argv, *other_flags, "--load", str(tmp_path / "ck"), "--ckpt-step", "3"], tmp_path / "b.jsonl"
    )
    assert [r["iteration"] for r in resumed] == [4, 5]
    for got, want in zip(resumed, whole[3:]):
        assert got["learning_rate"] == want["learning_rate"] and got["consumed_samples"] == want["consumed_samples"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5) and got["grad_norm"] == pytest.approx(
            want["grad_norm"], rel=1e-4
        )


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_a_stage_with_nothing_to_train_saves_and_resumes(flags, tmp_path):
    """The second stage holds text layers alone, all frozen: no optimizer file beside it, and an exact resume."""
    argv = tiny_flags(
        tmp_path,
        *topology(pp=2),
        *flags,
        steps=4,
        text_decoder={"freeze": ["decoder.layers.[23].*", "decoder.final_layernorm", "output_layer"]},
    )
    unbroken = launch_synthetic(
        2, [*argv, "--from-scratch", "--save", str(tmp_path / "ck"), "--save-interval", "2"], tmp_path / "a.jsonl"
    )
    files = {file.name for file in (tmp_path / "ck" / "iter_0000002" / "mp_rank_00_001").iterdir()}
    assert (
        files == {"model_optim_rng.pt"}
        and (tmp_path / "ck" / "iter_0000002" / "mp_rank_00_000" / "optim_dp000.pt").exists()
    )
    resumed = launch_synthetic(2, [*argv, "--load", str(tmp_path / "ck"), "--ckpt-step", "2"], tmp_path / "b.jsonl")
    assert exact(resumed) == exact(unbroken[2:])


def _full_disk(rank: int, argv: list[str]) -> None:
    """Rank 1 cannot write in the second save."""
    from mm_models.mcore import checkpoint_save

    plain, calls = checkpoint_save.write_file, []

    def write_file(path, content):
        calls.append(path)
        if rank == 1 and "iter_0000002" in str(path):
            raise OSError(28, "No space left on device", str(path))
        return plain(path, content)

    checkpoint_save.write_file = write_file
    train_synthetic(rank, argv, Synthetic())


def test_a_failed_save_stops_all_ranks_and_leaves_the_one_before(tmp_path):
    argv = tiny_flags(
        tmp_path, *topology(pp=2), "--from-scratch", "--save", str(tmp_path / "ck"), "--save-interval", "1"
    )
    with pytest.raises(CaseFailed) as caught:
        run(_full_disk, 2, argv)
    assert str(caught.value).count("iteration 2 could not be written, the one before stays: rank 1: [Errno 28]") == 2
    assert open_checkpoint(tmp_path / "ck").manifest.iteration == 1
    assert {child.name for child in (tmp_path / "ck").iterdir()} == {
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    }


def test_the_data_position_is_resumed_on_every_rank(tmp_path):
    """23 samples at DP 2: five steps an epoch, three samples left out; stopped in the first and in the second epoch."""
    argv = tiny_flags(tmp_path, steps=12)
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    launch_synthetic(2, [*argv, "--from-scratch"], tmp_path / "m.jsonl", Synthetic(record=str(tmp_path / "whole")))
    save, broken = ["--save", str(tmp_path / "ck")], Synthetic(record=str(tmp_path / "broken"))
    launch_synthetic(2, [*argv, *save, "--from-scratch", "--exit-interval", "3"], tmp_path / "m.jsonl", broken)
    launch_synthetic(
        2, [*argv, *save, "--load", str(tmp_path / "ck"), "--exit-interval", "9"], tmp_path / "m.jsonl", broken
    )
    launch_synthetic(2, [*argv, *save, "--load", str(tmp_path / "ck")], tmp_path / "m.jsonl", broken)
    read = {
        name: [(tmp_path / name / f"rank{rank}.txt").read_text() for rank in range(2)] for name in ("whole", "broken")
    }
    assert read["whole"] == read["broken"]
    rows = [line.split() for text in read["whole"] for line in text.splitlines()]
    epoch = [id for step, id in rows if int(step) <= 5]
    assert len(epoch) == len(set(epoch)) == 20


def test_sigterm_on_one_rank_saves_on_all_and_resumes_exactly(tmp_path):
    argv = tiny_flags(tmp_path, steps=5)
    unbroken = launch_synthetic(2, [*argv, "--from-scratch"], tmp_path / "a.jsonl")
    stopped = run(
        train_synthetic,
        2,
        [*argv, "--from-scratch", "--save", str(tmp_path / "ck"), "--log-metrics", str(tmp_path / "b.jsonl")],
        Synthetic(terminate=(2, 1)),
    )
    assert all("stopped by SIGTERM after iteration 2, saved at iteration 2" in text for text in stopped)
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = launch_synthetic(2, [*argv, "--load", str(tmp_path / "ck")], tmp_path / "b.jsonl")
    assert exact(resumed) == exact(unbroken)  # the metrics file holds the whole run


POINTS = [
    ("mmfolder.begin", "after", 0),
    ("write_file", "before", 1),
    ("write_file", "after", 1),
    ("write_manifest", "before", 0),
    ("write_manifest", "after", 0),
    ("mmfolder.finish", "after", 0),
    ("mmfolder.write_tracker", "before", 0),
    ("mmfolder.write_tracker", "after", 0),
]
"""(function of a save, before or after it, which rank is killed there)."""


def _die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train_and_die(rank: int, argv: list[str], save: str, moment: float | tuple[str, str, int]) -> None:
    """Train, and die by SIGKILL in the first save: some seconds after its folder appears, or at a point of `POINTS`."""
    from mm_models.mcore import checkpoint_save

    if isinstance(moment, tuple):
        name, when, victim = moment
        place = checkpoint_save.mmfolder if "." in name else checkpoint_save
        plain = getattr(place, name.rpartition(".")[2])

        def dying(*args, **how):
            if when == "before":
                _die()
            result = plain(*args, **how)
            _die()
            return result

        if rank == victim:
            setattr(place, name.rpartition(".")[2], dying)
    else:

        def watch():
            while not list(Path(save).glob("*.tmp-*")):
                time.sleep(0.0005)
            time.sleep(moment)
            _die()

        threading.Thread(target=watch, daemon=True).start()
    train_synthetic(rank, argv, Synthetic())
    time.sleep(5)


@pytest.mark.slow
def test_twenty_kills_while_saving_lose_nothing(tmp_path):
    """Every other kill strikes all ranks at a random moment, the rest one rank at a chosen point. Each restart goes on from the
    last complete step; at the end the whole run is the unbroken one, bit for bit."""
    argv = tiny_flags(tmp_path, DISTRIBUTED, steps=14)
    unbroken = launch_synthetic(2, [*argv, "--from-scratch"], tmp_path / "a.jsonl")
    save, metrics, draw, reached = tmp_path / "ck", tmp_path / "b.jsonl", random.Random(7), []
    going = [*argv, "--save", str(save), "--save-interval", "1"]
    save.mkdir()

    def begin() -> list[str]:
        tracker = save / "latest_checkpointed_iteration.txt"
        reached.append(int(tracker.read_text()) if tracker.exists() else 0)
        if reached[-1]:
            assert open_checkpoint(save).manifest.iteration == reached[-1]  # what the tracker names is complete
        return ["--load", str(save)] if reached[-1] else ["--from-scratch"]

    random_moments = [10 ** draw.uniform(-3, 0.2) for _ in range(20 - len(POINTS))]
    for moment in [item for pair in itertools.zip_longest(random_moments, POINTS) for item in pair if item is not None]:
        with pytest.raises(CaseFailed):
            case = [*going, *begin(), "--log-metrics", str(metrics)]
            run(_train_and_die, 2, case, str(save), moment, timeout=60)
    launch_synthetic(2, [*going, *begin()], metrics)
    assert reached == sorted(reached) and len(reached) == 21 and 0 < reached[-1] < 14
    assert exact(read_metrics(metrics)) == exact(unbroken)
    assert not list(save.glob("*.tmp-*"))


RESPLITS = {
    "tp2-ep2 to pp2": ((4, [*topology(tp=2, etp=1, ep=2), SP, DISTRIBUTED]), (2, topology(pp=2)), ["--pp", "2"]),
    "pp2-vpp2 to tp2": ((2, topology(pp=2, vpp=2)), (2, [*topology(tp=2), SP, DISTRIBUTED]), ["--tp", "2"]),
    "ep2 bf16 to one": ((2, [*topology(ep=2), DISTRIBUTED, "--bf16"]), (1, ["--bf16"]), ["--tp", "1"]),
}


@pytest.mark.parametrize("name", RESPLITS)
def test_a_run_goes_on_at_another_topology_after_resplit(name, tmp_path):
    """Weights, moments, schedule and position are carried; the losses are the unbroken run's up to rounding."""
    from mm_models.cli.convert import main

    (nprocs, flags), (others, other_flags), how = RESPLITS[name]
    argv = tiny_flags(tmp_path, *SCHEDULE, steps=5)
    whole = launch_synthetic(
        nprocs,
        [*argv, *flags, "--from-scratch", "--save", str(tmp_path / "ck"), "--save-interval", "3"],
        tmp_path / "a.jsonl",
    )
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("3")
    assert main(["resplit", "--mm", str(tmp_path / "ck"), "--out", str(tmp_path / "new"), *how]) in (0, None)
    resumed = launch_synthetic(others, [*argv, *other_flags, "--load", str(tmp_path / "new")], tmp_path / "b.jsonl")
    assert [r["iteration"] for r in resumed] == [4, 5]
    for got, want in zip(resumed, whole[3:]):
        assert got["learning_rate"] == want["learning_rate"] and got["consumed_samples"] == want["consumed_samples"]
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-2 if "--bf16" in flags else 1e-5)
