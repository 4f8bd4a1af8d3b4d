"""What may go wrong while a checkpoint is written, in the foreground and behind the training; which ones stay."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_models.weights import mmfolder
from tests.fsdp2.test_checkpoint import exact
from tests.fsdp2.trainer_kit import Synthetic, changed, config, launch, printed, stock, train, write_hf
from tests.harness import CaseFailed, run

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="session")
def hf(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "hf")


def settings(hf: Path, save: Path, **changes: Any) -> dict[str, Any]:
    """Two samples a step on two ranks, a checkpoint every step."""
    return config(hf, **{"training__save": str(save), "training__save_interval": 1} | changes)


def names(folder: Path) -> set[str]:
    return {child.name for child in folder.iterdir()}


def _full_disk(rank: int, raw: dict) -> None:
    """Rank 1 cannot write in the second save."""
    from mm_models.weights.dcp import writer

    plain = writer.write_rank_file

    def write_rank_file(folder, number, shards):
        if rank == 1 and "iter_0000002" in str(folder):
            raise OSError(28, "No space left on device", str(folder))
        return plain(folder, number, shards)

    writer.write_rank_file = write_rank_file
    train(rank, raw, Synthetic())


@pytest.mark.parametrize("behind", [False, True], ids=["foreground", "async"])
def test_a_failed_save_stops_all_ranks_and_leaves_the_one_before(behind, hf, tmp_path):
    with pytest.raises(CaseFailed) as caught:
        run(_full_disk, 2, settings(hf, tmp_path / "ck", training__save_async=behind), timeout=60)
    told = "iteration 2 could not be written, the one before stays: rank 1: "
    assert str(caught.value).count(told) == 2 and "No space left on device" in str(caught.value)
    assert names(tmp_path / "ck") == {"iter_0000001", TRACKER}
    assert (tmp_path / "ck" / TRACKER).read_text() == "1"


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_folder_that_cannot_be_is_refused_before_the_first_step(below, hf, tmp_path):
    (tmp_path / "file").write_text("")
    raw = settings(hf, tmp_path / "file" / below, training__log_metrics=str(tmp_path / "m.jsonl"))
    with pytest.raises(CaseFailed, match=r"UserError: training\.save: .*file.* cannot be made"):
        run(train, 1, raw, Synthetic())
    assert not (tmp_path / "m.jsonl").exists()


def _slow_writer(rank: int, raw: dict, seconds: float) -> list[tuple[str, int]]:
    """Rank 1 takes its time to write. Returns when each iteration ended and was published, in order."""
    from mm_models.fsdp2 import checkpoint_save, training
    from mm_models.weights.dcp import writer

    events: list[tuple[str, int]] = []
    plain, step, publish = writer.write_rank_file, training.one_iteration, checkpoint_save.Saver._publish

    def write_rank_file(folder, number, shards):
        time.sleep(seconds if rank == 1 else 0.0)
        return plain(folder, number, shards)

    def one_iteration(*args):
        state = step(*args)
        events.append(("step", state.iteration))
        return state

    def published(saver):
        events.append(("publish", saver._under_way.state.iteration))
        publish(saver)

    writer.write_rank_file, training.one_iteration = write_rank_file, one_iteration
    checkpoint_save.Saver._publish = published
    train(rank, raw, Synthetic())
    return events


def test_training_goes_on_while_a_save_is_written(hf, tmp_path):
    """One slow rank: publication waits for it, at the same step everywhere, and holds what the weights were at the save."""
    raw = settings(hf, tmp_path / "ck", training__save_async=True, training__train_iters=6, training__save_interval=3)
    foreground = changed(raw, {"training.save_async": False, "training.save": str(tmp_path / "plain")})
    launch(2, foreground, tmp_path / "a.jsonl")
    one, two = run(_slow_writer, 2, raw, 1.0, timeout=60)
    assert one == two
    assert one.index(("publish", 3)) > one.index(("step", 4)) and one[-1] == ("publish", 6)
    assert (tmp_path / "ck" / TRACKER).read_text() == "6"
    for name in ("iter_0000003", "iter_0000006"):
        got, want = stock(tmp_path / "ck" / name), stock(tmp_path / "plain" / name)
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in got), name


def test_a_second_save_waits_for_the_first(hf, tmp_path):
    raw = settings(hf, tmp_path / "ck", training__save_async=True, training__train_iters=3)
    events = run(_slow_writer, 2, raw, 0.5, timeout=60)[0]
    published = [event for event in events if event[0] == "publish"]
    assert published == [("publish", 1), ("publish", 2), ("publish", 3)]
    assert names(tmp_path / "ck") == {"iter_0000001", "iter_0000002", "iter_0000003", TRACKER}


def test_an_async_run_resumes_exactly(hf, tmp_path):
    base = {"training__train_iters": 4, "training__save_async": True, "training__save_interval": 2}
    whole = launch(2, settings(hf, tmp_path / "ck", **base), tmp_path / "a.jsonl")
    load = {"training__load": str(tmp_path / "ck" / "iter_0000002")}
    resumed = launch(2, settings(hf, tmp_path / "b", **base | load), tmp_path / "b.jsonl")
    assert exact(resumed) == exact(whole[2:])


def test_only_the_last_checkpoints_stay(hf, tmp_path):
    """Never the one just published, nor the one the run came from, nor a release."""
    save = tmp_path / "ck"
    launch(2, settings(hf, save, training__keep_last=2), tmp_path / "a.jsonl")
    assert names(save) == {"iter_0000003", "iter_0000004", TRACKER}
    (save / "release").mkdir()
    (save / "release" / mmfolder.MANIFEST).write_text("{}")
    again = {"training__load": str(save / "iter_0000003"), "training__train_iters": 6, "training__keep_last": 1}
    launch(2, settings(hf, save, **again), tmp_path / "a.jsonl")
    assert names(save) == {"iter_0000003", "iter_0000006", "release", TRACKER}
    assert (save / TRACKER).read_text() == "6"


def test_without_save_nothing_is_saved_and_it_says_so(hf, tmp_path):
    first, last = printed(2, config(hf, training__train_iters=2))
    assert "checkpoints: none, training.save is null" in first and "checkpoints:" not in last
    assert "saved iteration" not in first


def test_a_run_into_the_folder_of_a_longer_one_says_so(hf, tmp_path):
    save = tmp_path / "ck"
    assert "WARNING" not in printed(1, settings(hf, save, training__train_iters=3))[0]
    again = printed(1, settings(hf, save, training__train_iters=1))[0]
    assert again.count(f"WARNING: {save} holds iter_0000001, iter_0000002, iter_0000003 already") == 1
    assert (save / TRACKER).read_text() == "1"


def test_the_last_step_is_saved_once(hf, tmp_path):
    first, _ = printed(2, settings(hf, tmp_path / "ck", training__train_iters=4, training__save_interval=2))
    assert [line for line in first.splitlines() if line.startswith("saved iteration")] == [
        f"saved iteration {n} to {tmp_path / 'ck' / f'iter_{n:07d}'}" for n in (2, 4)
    ]
