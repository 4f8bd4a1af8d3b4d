"""Resume: the learning rate by its formula, never restarted or stepped twice; a changed batch size is never taken in silence."""

from __future__ import annotations

import math

import pytest

from tests.harness import CaseFailed
from tests.mcore.test_checkpoint import EXACT
from tests.mcore.training_kit import Synthetic, launch_synthetic, printed, tiny_flags

WARMUP, TOTAL, PEAK, LOWEST = 4, 20, 1e-3, 1e-5
SCHEDULE = (
    "--lr-decay-style",
    "cosine",
    "--lr-warmup-iters",
    str(WARMUP),
    "--lr-decay-iters",
    str(TOTAL),
    "--min-lr",
    str(LOWEST),
)


def rate(step: int) -> float:
    """The learning rate of the 1-based step: linear to the peak, then half a cosine to the lowest."""
    done = step - 1
    if done <= WARMUP:
        return PEAK * done / WARMUP
    return LOWEST + (PEAK - LOWEST) * (1 + math.cos(math.pi * (done - WARMUP) / (TOTAL - WARMUP))) / 2


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Ten steps in one go, saved at 2 (inside the warm-up) and 5; (folder, records)."""
    folder = tmp_path_factory.mktemp("field") / "run"
    argv = [
        *tiny_flags(folder, *SCHEDULE, steps=10, batch=2),
        "--from-scratch",
        "--save",
        str(folder / "ck"),
        "--save-interval",
        "1",
    ]
    return folder, launch_synthetic(1, argv, folder / "m.jsonl")


def test_the_schedule_is_the_formula(unbroken):
    """B39: warm-up of 4 and cosine over 20, step by step, by hand."""
    for record in unbroken[1]:
        assert record["learning_rate"] == pytest.approx(rate(record["iteration"]), rel=1e-9, abs=1e-15)
        assert record["next_learning_rate"] == pytest.approx(rate(record["iteration"] + 1), rel=1e-9)


@pytest.mark.parametrize("stop", [2, 5])
def test_a_run_stopped_in_or_after_the_warm_up_goes_on_as_if_nothing_had_happened(unbroken, tmp_path, stop):
    """B39: learning rate, loss, norm and consumed samples of every later step, to the bit."""
    folder, records = unbroken
    argv = [*tiny_flags(tmp_path, *SCHEDULE, steps=10, batch=2), "--load", str(folder / "ck"), "--ckpt-step", str(stop)]
    resumed = launch_synthetic(1, argv, tmp_path / "m.jsonl")
    assert [[one[key] for key in EXACT] for one in resumed] == [[one[key] for key in EXACT] for one in records[stop:]]
    assert [one["iteration"] for one in resumed] == list(range(stop + 1, 11))


def test_another_global_batch_is_not_taken_in_silence(unbroken, tmp_path):
    """B39: twice the global batch stretches a schedule that counts samples: refused with both, or chosen and printed; samples go on
    where they were."""
    folder, records = unbroken
    argv = [*tiny_flags(tmp_path, *SCHEDULE, steps=10, batch=4), "--load", str(folder / "ck"), "--ckpt-step", "5"]
    with pytest.raises(CaseFailed, match="lr_warmup_steps was 8, is now 16; lr_decay_steps was 40, is now 80"):
        launch_synthetic(1, argv, tmp_path / "no.jsonl")
    (tmp_path / "ids").mkdir()
    chosen = [
        *argv,
        "--use-checkpoint-opt_param-scheduler",
        "--exit-interval",
        "6",
        "--log-metrics",
        str(tmp_path / "m.jsonl"),
    ]
    (said,) = printed(1, chosen, Synthetic(record=str(tmp_path / "ids")))
    assert "the checkpoint's schedule" in said and "--global-batch-size was 2, is 4" in said
    assert f"learning rate {records[5]['learning_rate']:.6E}" in said  # no jump
    from mm_models.train.log import read_metrics

    (record,) = read_metrics(tmp_path / "m.jsonl")
    assert record["learning_rate"] == records[5]["learning_rate"] and record["consumed_samples"] == 10 + 4


def test_position_survives_a_change_of_ranks(unbroken, tmp_path):
    """B40: stopped at 5 on one process and resumed on two: the samples of every later step are those of the unbroken run."""
    folder, _ = unbroken
    read = {}
    for name, nprocs, start in (
        ("whole", 1, ["--from-scratch"]),
        ("two", 2, ["--load", str(folder / "ck"), "--ckpt-step", "5"]),
    ):
        (tmp_path / name).mkdir()
        argv = [*tiny_flags(tmp_path, *SCHEDULE, steps=10, batch=2), *start]
        launch_synthetic(nprocs, argv, tmp_path / f"{name}.jsonl", Synthetic(record=str(tmp_path / name)))
        rows = [
            line.split()
            for rank in range(nprocs)
            for line in (tmp_path / name / f"rank{rank}.txt").read_text().splitlines()
        ]
        read[name] = {
            step: sorted(int(id) for at, *ids in rows for id in ids if int(at) == step) for step in range(6, 11)
        }
    assert read["two"] == read["whole"] and all(len(ids) == 2 for ids in read["two"].values())
