"""Rows examined in worker processes: the same samples in the same order, whatever their number (field case B56)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
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


@pytest.fixture(scope="module")
def many(folder, tmp_path_factory):
    """200 rows as data.json, with a cache for those who want one."""
    base = tmp_path_factory.mktemp("many")
    names = [kit.picture(base / f"{index}.png", seed=index).name for index in range(5)]
    rows = [kit.row(f"<image>number {k}", "n" * (k + 1), images=[names[k % 5]]) for k in range(200)]
    for name, folder_name in (("plain", None), ("cached", str(base / "cache"))):
        config = kit.data_config(folder, base, rows, preprocessing_batch_size=10, cache_dir=folder_name)
        (base / f"{name}.json").write_text(config.model_dump_json(exclude_none=True))
    return base


def start(path, *workers, parallelism=None):
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    environment |= {"TOKENIZERS_PARALLELISM": parallelism} if parallelism else {}
    command = [sys.executable, "-m", "tests.data.preprocess_case", str(path), *workers]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=kit.QUICKSTART.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(program, seconds):
    try:
        return program.communicate(timeout=seconds)
    finally:
        program.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestAfterATokenizerCall:
    @pytest.mark.parametrize("parallelism", [None, "true"])
    def test_any_number_of_workers(self, many, parallelism):
        """On two ranks at once."""
        programs = [start(many / "plain.json", "0", "1", "8", "64", parallelism=parallelism) for _ in range(2)]
        found = set()
        for program in programs:
            out, err = finish(program, 4 * 120)
            lines = [line.split() for line in out.splitlines()]
            assert program.returncode == 0 and len(lines) == 4 and not err, out + err
            found |= {(count, digest) for count, digest, _ in lines}
            assert all(float(seconds) < 120 for _, _, seconds in lines), out
        ((count, _),) = found
        assert count == "200"

    def test_two_ranks_at_once(self, many):
        programs = [start(many / "cached.json", "8", parallelism="true") for _ in range(2)]
        found = [finish(program, 240)[0].splitlines()[-1].split() for program in programs]  # one may say that it waits
        assert found[0][0] == "200" and found[0][:2] == found[1][:2]
        assert len(list((many / "cache").glob("*.samples.arrow"))) == 1

    def test_a_killed_worker(self, many):
        program = start(many / "plain.json", "8")
        until = time.monotonic() + 120
        workers = []
        while not workers and time.monotonic() < until:
            time.sleep(0.05)
            below = psutil.Process(program.pid).children(recursive=True)
            workers = [process for process in below if process.ppid() != program.pid]
        workers[0].kill()
        _, err = finish(program, 120)
        assert program.returncode != 0
        assert "was killed by SIGKILL" in err and "preprocessing_num_workers" in err
