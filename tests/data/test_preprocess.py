"""Rows examined in worker processes: the same samples in the same order, whatever their number (field case B56)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mm_models.data import preprocess
from mm_models.data.dataset import ChatDataset
from mm_models.data.workers import ordered
from mm_models.errors import UserError
from tests.data import kit


@pytest.fixture
def base(tmp_path):
    """Ten rows: kept, dropped and noted."""
    rows = [kit.row(f"number {index}", "n" * index, "and", "x") for index in range(10)]
    rows[3] = kit.row("q", "")
    rows[7] = kit.row("what is <|image|>?", "a")
    kit.data_config(tmp_path, tmp_path, rows)
    return tmp_path


def build(folder, processor, template, base, **changes):
    return ChatDataset(kit.data_config(folder, base, **changes), processor, template)


def test_workers_give_the_same_samples(folder, processor, template, base, monkeypatch):
    monkeypatch.setattr(preprocess, "cores", lambda: 3)
    plain = build(folder, processor, template, base)
    for size in (1, 4):
        found = build(folder, processor, template, base, preprocessing_num_workers=3, preprocessing_batch_size=size)
        assert list(found) == list(plain) and found.report.counts == plain.report.counts
    assert plain.report.dropped == {"no answer to learn from": [3]} and list(plain.report.notes.values()) == [[7]]


@pytest.mark.parametrize(
    ("asked", "tasks", "expected"), [(None, 9, 0), (0, 9, 0), (8, 1, 0), (2, 9, 2), (8, 3, 3), (64, 99, 4)]
)
def test_how_many_processes(monkeypatch, asked, tasks, expected):
    monkeypatch.setattr(preprocess, "cores", lambda: 4)
    assert preprocess.worker_count(asked, tasks) == expected


def _start(delay):
    def work(task):
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "refuse":
            raise UserError("no good")
        if task == "fail":
            raise KeyError("lost")
        time.sleep(delay * (task % 3))
        return task * 10

    return work


def shared(tasks, delay=0.0, processes=3):
    return list(ordered(tasks, processes=processes, start=_start, arguments=(delay,), keys="some_key"))


def test_results_come_in_order():
    assert shared(list(range(20)), delay=0.02) == [index * 10 for index in range(20)]


def test_a_killed_worker_is_one_error_that_names_the_setting():
    with pytest.raises(
        UserError, match=r"was killed by SIGKILL at task 2 of 5, die. When memory ran out, lower some_key"
    ):
        shared([1, 2, "die", 4, 5])


def test_errors_of_a_worker():
    with pytest.raises(UserError, match=r"^no good$"):
        shared([1, "refuse"])
    with pytest.raises(RuntimeError, match=r"failed at fail:(?s:.*)KeyError: 'lost'"):
        shared([1, "fail"])


def test_workers_end_with_the_main_process(tmp_path):
    """A main process killed in the middle leaves none behind."""
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys, time\n"
        "from mm_models.data.workers import ordered\n"
        "def start():\n"
        "    return work\n"
        "def work(task):\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(0.2 if task < 2 else 0)\n"
        "if __name__ == '__main__':\n"
        "    for task in ordered(range(2000000), processes=2, start=start, arguments=(), keys='k'):\n"
        "        if task is None and sys.stdin.read(1): pass\n"
    )
    main = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    workers = {int(main.stdout.readline()) for _ in range(2)}
    main.kill()
    main.wait()
    until = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < until:
        time.sleep(0.1)
    main.stdout.close()
    main.stdin.close()
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
