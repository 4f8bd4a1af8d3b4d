"""`pretrain_fsdp2.py` as users start it, over real images: torchrun, its exit status, its log, its ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_models.train.log import read_metrics
from mm_models.weights.dcp.folder import open_dcp
from tests.fsdp2.trainer_kit import EXPERTS, FSDP, changed
from tests.mcore.test_pretrain import LINE, environment
from tests.mcore.training_kit import BATCH, CLIP, DECAY, RATE, World, reference, world  # noqa: F401

ROOT = Path(__file__).parents[2]


def configuration(world: World, folder: Path, **changes: Any) -> Path:  # noqa: F811
    """A YAML file over the quickstart's checkpoint and data."""
    data = yaml.safe_load((world.folder / "data" / "data.json").read_text())
    raw = {
        "parallel": {"fsdp_plan": {"apply_modules": FSDP}, "ep_plan": {"apply_modules": EXPERTS}},
        "data": data,
        "model": {"model_id": "glm4v_moe", "model_name_or_path": str(world.hf)},
        "training": {
            "train_iters": 3, "lr": RATE, "lr_decay_style": "linear", "weight_decay": DECAY, "clip_grad": CLIP,
            "load": str(world.hf), "log_metrics": str(folder / "m.jsonl"), "distributed_timeout_minutes": 1,
        },
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(changed(raw, {key.replace("__", "."): value for key, value in changes.items()})))
    return path


def command(nprocs: int, *argv: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nprocs)] if nprocs else []
    return [sys.executable, *launcher, str(ROOT / "pretrain_fsdp2.py"), *argv]


def start(nprocs: int, *argv: str, timeout: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(command(nprocs, *argv), env=environment(), capture_output=True, text=True, timeout=timeout)


def test_torchrun_trains_logs_and_ends_well(world, tmp_path):  # noqa: F811
    """Two processes, experts spread over both; losses are Hugging Face's."""
    changes = {"parallel__expert_parallel_size": 2, "training__gradient_accumulation_steps": BATCH // 2}
    path = configuration(world, tmp_path, training__save=str(tmp_path / "out"), **changes)
    done = start(2, str(path), f"training.tensorboard_dir={tmp_path / 'tb'}")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [match for line in done.stdout.splitlines() if (match := LINE.fullmatch(line))]
    assert [(int(m["iteration"]), int(m["total"]), int(m["consumed"]), int(m["gbs"])) for m in lines] == [
        (1, 3, 4, 4),
        (2, 3, 8, 4),
        (3, 3, 12, 4),
    ]
    records = read_metrics(tmp_path / "m.jsonl")
    for got, want in zip(records, reference(world, steps=3)["records"], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert [float(m["lr"]) for m in lines] == pytest.approx([r["next_learning_rate"] for r in records])
    assert open_dcp(tmp_path / "out").iteration == 3
    assert {p.name for p in (tmp_path / "out" / "iter_0000003").iterdir()} == {
        ".metadata", "__0_0.distcp", "__1_0.distcp", "config.yaml", "manifest.json", "trainer.pt",
    }  # fmt: skip
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))
    for said in ("end of configuration", "rank  device", "saved iteration 3", "training ended at iteration 3 of 3"):
        assert done.stdout.count(said) == 1, said
    assert "\x1b" not in done.stdout  # no progress bar outside a terminal


@pytest.mark.slow
def test_one_process_needs_no_launcher_and_never_loads_megatron(world, tmp_path):  # noqa: F811
    (tmp_path / "watch.py").write_text(
        "import atexit, sys\natexit.register(lambda: print('megatron loaded:', 'megatron' in sys.modules, flush=True))\n"
    )
    path = configuration(world, tmp_path, training__load=None, training__from_scratch=True, training__train_iters=1)
    done = start(0, str(path), f"training.plugin=[{tmp_path / 'watch.py'}]")
    assert done.returncode == 0, done.stderr[-3000:]
    assert LINE.search(done.stdout) and "weights: drawn from seed 1234" in done.stdout
    assert "megatron loaded: False" in done.stdout


@pytest.mark.slow
def test_mistakes_end_in_one_line_and_status_2(world, tmp_path):  # noqa: F811
    path = configuration(world, tmp_path)
    for words, told in (
        (["training.learning_rat=1"], "learning_rat"),
        ([f"training.load={tmp_path / 'typo'}"], str(tmp_path / "typo")),
        ([f"data.dataset_param.basic_parameters.dataset={tmp_path / 'none.json'}"], "none.json"),
    ):
        done = start(0, str(path), *words)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]
        assert done.stderr.count("error: ") == 1


def _wait(process: subprocess.Popen, metrics: Path, lines: int) -> None:
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") >= lines):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_saves_and_sigkill_loses_nothing(world, tmp_path):  # noqa: F811
    """Stopped in order, then killed in the middle of a later step; each time the run goes on from the last checkpoint."""
    save, metrics = tmp_path / "ck", tmp_path / "m.jsonl"
    path = configuration(world, tmp_path, training__save=str(save), training__train_iters=400)
    constant = ["training.lr_decay_style=constant"]
    process = subprocess.Popen(
        command(2, str(path), *constant), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait(process, metrics, 2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode != 0 and "training ended" not in out, (out[-2000:], err[-2000:])
    saved = open_dcp(save).iteration
    assert f"stopped by SIGTERM after iteration {saved}, saved at iteration {saved}" in out

    again = [str(path), *constant, f"training.load={save}", "training.save_interval=1"]
    process = subprocess.Popen(
        command(2, *again), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    _wait(process, metrics, saved + 3)
    for worker in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(worker), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    kept = open_dcp(save).iteration
    assert kept >= saved + 1
    done = start(2, *again, f"training.exit_interval={kept + 1}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed from {save / f'iter_{kept:07d}'}" in done.stdout
    assert [r["iteration"] for r in read_metrics(metrics)] == list(range(1, kept + 2))
