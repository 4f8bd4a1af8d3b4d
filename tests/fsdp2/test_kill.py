"""SIGKILL at any moment: what the tracker names is complete, and the restarted run is the unbroken one, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from mm_models.train.log import read_metrics
from mm_models.weights.dcp.folder import open_dcp
from tests.fsdp2.test_checkpoint import exact
from tests.fsdp2.trainer_kit import Synthetic, changed, config, launch, train, write_hf
from tests.harness import CaseFailed, run

POINTS = [
    ("mm_models.weights.mmfolder.begin", "after", 0),
    ("mm_models.weights.dcp.writer.write_rank_file", "before", 1),
    ("mm_models.weights.dcp.writer.write_rank_file", "after", 1),
    ("mm_models.weights.dcp.writer.finish", "before", 0),
    ("mm_models.weights.dcp.writer.finish", "after", 0),
    ("mm_models.weights.mmfolder.finish", "after", 0),
    ("mm_models.weights.mmfolder.write_tracker", "before", 0),
    ("mm_models.weights.mmfolder.write_tracker", "after", 0),
]
"""(function of a save, before or after it, which rank is killed there)."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train_and_die(rank: int, raw: dict, save: str, moment: float | tuple[str, str, int], spared: int) -> None:
    """Train, and die in the save after `spared` others: some seconds after its folder appears, or at a point of `POINTS`."""
    import importlib

    if isinstance(moment, tuple):
        path, when, victim = moment
        module, _, name = path.rpartition(".")
        place = importlib.import_module(module)
        plain, calls = getattr(place, name), []

        def dying(*args, **how):
            calls.append(name)
            if when == "before" and len(calls) > spared:
                _die()
            result = plain(*args, **how)
            if len(calls) > spared:
                _die()
            return result

        if rank == victim:
            setattr(place, name, dying)
    else:
        left_over = set(Path(save).glob("*.tmp-*"))

        def watch():
            seen: set[Path] = set()
            while len(seen) <= spared:
                seen |= set(Path(save).glob("*.tmp-*")) - left_over
                time.sleep(0.0005)
            time.sleep(moment)
            _die()

        threading.Thread(target=watch, daemon=True).start()
    train(rank, raw, Synthetic())
    time.sleep(5)


def begin(save: Path, hf: Path) -> tuple[dict, int]:
    """How the next attempt starts, and from which iteration. What the tracker names is whole."""
    tracker = save / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return {"training.load": str(hf)}, 0
    reached = int(tracker.read_text())
    assert open_dcp(save).iteration == reached
    return {"training.load": str(save)}, reached


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("behind", [False, True], ids=["foreground", "async"])
def test_kills_while_saving_lose_nothing(behind, tmp_path):
    """Twenty kills in the foreground, alternately of all ranks at a random moment and of one at a chosen point; fewer behind it."""
    hf, save, metrics = write_hf(tmp_path / "hf"), tmp_path / "ck", tmp_path / "b.jsonl"
    save.mkdir()
    raw = config(hf, training__train_iters=16, parallel__expert_parallel_size=2)
    unbroken = launch(2, raw, tmp_path / "a.jsonl", timeout=120)
    going = {"training.save": str(save), "training.save_interval": 1, "training.log_metrics": str(metrics)}
    going = changed(raw, going | {"training.save_async": behind})
    draw, reached = random.Random(7), []
    moments = [10 ** draw.uniform(-3, 0.2) for _ in range(4 if behind else 20 - len(POINTS))]
    points = POINTS[1:6:2] if behind else POINTS
    for moment in [item for pair in itertools.zip_longest(moments, points) for item in pair if item is not None]:
        change, iteration = begin(save, hf)
        reached.append(iteration)
        if iteration >= 15:
            continue
        with pytest.raises(CaseFailed):
            run(_train_and_die, 2, changed(going, change), str(save), moment, int(behind), timeout=120)
    change, iteration = begin(save, hf)
    launch(2, changed(going, change), metrics, timeout=240)
    assert [*reached, iteration] == sorted([*reached, iteration]) and 0 < iteration < 16
    assert exact(read_metrics(metrics)) == exact(unbroken)
    assert not list(save.glob("*.tmp-*"))
