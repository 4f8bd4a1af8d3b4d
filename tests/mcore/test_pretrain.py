"""The entry script as users start it: torchrun, its exit status, its log, its ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mm_models.train.log import read_metrics
from mm_models.weights.manifest import open_checkpoint
from tests.mcore.test_training import SP, agree, topology
from tests.mcore.training_kit import reference, world  # noqa: F401

ROOT = Path(__file__).parents[2]
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(?P<iteration>\d+)/ +(?P<total>\d+) \| consumed samples: +(?P<consumed>\d+) \| "
    r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \| learning rate: (?P<lr>\S+) \| global batch size: +(?P<gbs>\d+) \| "
    r"lm loss: (?P<loss>\S+) \| loss scale: 1\.0 \| grad norm: (?P<norm>[\d.]+) \| "
    r"number of skipped iterations: +(?P<skipped>\d+) \| number of nan iterations: +(?P<nans>\d+) \|"
)
"""Megatron's line, all of it."""


def command(nprocs: int, *argv: str) -> list[str]:
    launcher = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nprocs)]
        if nprocs
        else [sys.executable]
    )
    return [*launcher, str(ROOT / "pretrain_vlm.py"), *argv]


def environment() -> dict[str, str]:
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(nprocs: int, *argv: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(nprocs, *argv), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def test_torchrun_trains_logs_and_ends_well(world, tmp_path):  # noqa: F811
    """TP2 · PP2 on four processes, from another folder with a space in its name; losses are Hugging Face's."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    flags = world.flags(
        *topology(tp=2, pp=2), SP, "--save", "out", "--log-metrics", "m.jsonl", "--tensorboard-dir", "tb", steps=3
    )
    done = start(4, *flags, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [match for line in done.stdout.splitlines() if (match := LINE.fullmatch(line))]
    assert [(int(m["iteration"]), int(m["total"]), int(m["consumed"]), int(m["gbs"])) for m in lines] == [
        (1, 3, 4, 4),
        (2, 3, 8, 4),
        (3, 3, 12, 4),
    ]
    records = read_metrics(folder / "m.jsonl")
    agree(records, reference(world, steps=3)["records"])
    assert [float(m["loss"]) for m in lines] == pytest.approx([r["loss"] for r in records], rel=1e-6)
    assert [float(m["lr"]) for m in lines] == pytest.approx([r["next_learning_rate"] for r in records])
    assert {(m["skipped"], m["nans"]) for m in lines} == {("0", "0")}
    assert open_checkpoint(folder / "out").manifest.iteration == 3
    assert {p.name for p in (folder / "out" / "iter_0000003").iterdir()} == {
        "manifest.json",
        *(f"mp_rank_{t:02d}_{p:03d}" for t in (0, 1) for p in (0, 1)),
    }
    assert list((folder / "tb").glob("events.out.tfevents.*"))
    for said in (
        "rank  stage  tp  dp  ep  chunk: holds",
        "frozen: 0 parameters",
        "saved iteration 3",
        "training ended at iteration 3 of 3",
    ):
        assert done.stdout.count(said) == 1, said
    assert "\x1b" not in done.stdout  # no progress bar outside a terminal


@pytest.mark.slow
def test_one_process_needs_no_launcher(world, tmp_path):  # noqa: F811
    done = start(0, *world.flags(steps=1, start=None), "--from-scratch")
    assert done.returncode == 0, done.stderr[-3000:]
    assert LINE.search(done.stdout) and "weights: drawn from seed 1234" in done.stdout


def test_check_validates_and_stops(world, tmp_path):  # noqa: F811
    done = start(0, *world.flags("--check"))
    assert done.returncode == 0 and "check passed" in done.stdout and not LINE.search(done.stdout)
    done = start(0, *world.flags("--check", start=str(tmp_path / "nowhere")))
    assert done.returncode == 2 and str(tmp_path / "nowhere") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_mistakes_end_in_one_line_and_status_2(world, tmp_path):  # noqa: F811
    for flags, words in (
        (["--learning-rat", "1"], "did you mean '--lr'"),
        (world.flags(start=str(tmp_path / "typo")), str(tmp_path / "typo")),
        (world.flags("--global-batch-size=7")[:-1] + ["--micro-batch-size", "2"], "given twice"),
        (world.flags(data=tmp_path / "none.json"), "none.json"),
    ):
        done = start(0, *flags)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]
        assert done.stderr.count("error: ") == 1


@pytest.mark.slow
def test_a_bad_data_path_fails_under_torchrun(world, tmp_path):  # noqa: F811
    done = start(2, *world.flags(data=world.data("lost", dataset=str(tmp_path / "lost.json"))))
    assert done.returncode != 0 and "lost.json" in done.stderr and not LINE.search(done.stdout)


DIES = """
import os
from mm_models.train import batches

plain, steps = batches.gather_step, []

def gather_step(*args, **how):
    steps.append(1)
    if len(steps) == 2 and os.environ["RANK"] == "1":
        os._exit(3)
    return plain(*args, **how)

batches.gather_step = gather_step
"""


@pytest.mark.slow
def test_a_worker_that_dies_fails_the_run(world, tmp_path):  # noqa: F811
    (tmp_path / "dies.py").write_text(DIES)
    done = start(2, *world.flags("--plugin", str(tmp_path / "dies.py")))
    assert done.returncode != 0 and "training ended" not in done.stdout
    assert len(LINE.findall(done.stdout)) <= 1
    if "failed at step 2" in done.stderr:  # the other rank was heard before the launcher ended it
        assert "rank 0 (stage 0" in done.stderr


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_from_there(world, tmp_path):  # noqa: F811
    flags = world.flags("--save", str(tmp_path / "ck"), "--log-metrics", str(tmp_path / "m.jsonl"), steps=400)
    process = subprocess.Popen(
        command(2, *flags), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not ((tmp_path / "m.jsonl").exists() and (tmp_path / "m.jsonl").read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode != 0 and "training ended" not in out, (out[-2000:], err[-2000:])
    saved = open_checkpoint(tmp_path / "ck").manifest.iteration
    assert f"stopped by SIGTERM after iteration {saved}, saved at iteration {saved}" in out
    again = [word if word != str(world.hf) else str(tmp_path / "ck") for word in flags]
    done = start(2, *again, "--exit-interval", str(saved + 1))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed from {tmp_path / 'ck'}" in done.stdout
    assert [r["iteration"] for r in read_metrics(tmp_path / "m.jsonl")] == list(range(1, saved + 2))
