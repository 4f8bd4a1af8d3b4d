"""A conversion that is killed leaves nothing that loads, and the next run succeeds and cleans up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mm_models.errors import UserError
from mm_models.weights import hffolder
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import copy, to_hf, to_mm

SLOW = """
import os, sys, time
from mm_models.weights import engine
plain = engine.os.pwrite
engine.os.pwrite = lambda *a: (time.sleep(0.002), plain(*a))[1]   # spread the writing over about half a second
print("go", flush=True)
from mm_models.cli.convert import main
sys.exit(main(sys.argv[1:]))
"""


def run_and_kill(arguments: list[str], after: float) -> int:
    """The exit status of a slowed-down conversion that gets SIGKILL `after` seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments, "--jobs", "1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process.stdout.readline()
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    return process.wait()


@pytest.mark.parametrize("seed", range(6))
def test_hf_to_mm_killed_at_any_moment(hf, tmp_path, seed):
    out = tmp_path / "mm"
    arguments = ["hf_to_mm", "--hf", str(hf), "--out", str(out), "--tp", "2", "--pp", "2"]
    if run_and_kill(arguments, random.Random(seed).uniform(0.1, 1.2)) != 0 and out.exists():
        with pytest.raises(UserError):
            open_checkpoint(out)
        assert not list(out.glob("release/*")) or (out / "release/manifest.json").exists()
    assert (
        subprocess.run(
            [sys.executable, "-m", "mm_models.cli.convert", *arguments, "--overwrite"], check=True
        ).returncode
        == 0
    )
    assert compare(hf, out).equal
    assert sorted(child.name for child in out.iterdir()) == [
        "latest_checkpointed_iteration.txt",
        "model.json",
        "release",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_mm_to_hf_killed_at_any_moment(hf, tmp_path, seed):
    mm, out = to_mm(hf, tmp_path / "mm", tp=2, ep=2), tmp_path / "out"
    arguments = ["mm_to_hf", "--mm", str(mm), "--hf", str(hf), "--out", str(out)]
    run_and_kill(arguments, random.Random(seed).uniform(0.1, 1.0))
    assert not out.exists() or compare(hf, out).equal
    if not out.exists():
        to_hf(mm, hf, out)
    assert compare(hf, out).equal
    assert sorted(child.name for child in tmp_path.iterdir()) == ["mm", "out"]


def test_overwriting_and_killed_never_mixes_old_and_new(hf, hf_fp32, tmp_path):
    """The old checkpoint or the new one loads, or none does; never a mixture."""
    for seed in range(4):
        out = to_mm(hf, tmp_path / f"mm{seed}", pp=2)
        arguments = ["hf_to_mm", "--hf", str(hf_fp32), "--out", str(out), "--tp", "2", "--pp", "2", "--overwrite"]
        run_and_kill(arguments, random.Random(seed).uniform(0.2, 1.5))
        try:
            open_checkpoint(out)
        except UserError:
            continue
        assert compare(out, hf).equal or compare(out, hf_fp32).equal


def test_a_failure_while_writing_leaves_nothing(hf, tmp_path, monkeypatch):
    from mm_models.weights import engine

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        to_mm(hf, tmp_path / "mm", tp=2)
    assert not list((tmp_path / "mm").iterdir())


def test_too_little_space_is_refused_before_any_file(hf, tmp_path, monkeypatch):
    from mm_models.weights import output

    usage = output.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"0.00 GB are to be written, 0.00 GB are free"):
        to_mm(hf, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()


def test_foreign_and_existing_outputs_are_refused(hf, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not a checkpoint folder of this tool"):
        to_mm(hf, tmp_path / "mine")
    mm = to_mm(hf, tmp_path / "mm")
    with pytest.raises(UserError, match=r"exists already. Give another folder, or --overwrite"):
        to_mm(hf, mm)
    with pytest.raises(UserError, match="not an export of this tool"):
        to_hf(mm, hf, tmp_path / "mine")
    with pytest.raises(UserError, match="is the source itself"):
        to_hf(mm, hf, hf)
    out = to_hf(mm, hf, tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        to_hf(mm, hf, out)
    assert (tmp_path / "mine/thesis.txt").read_text() == "x"


def test_a_source_that_shrinks_is_named(hf, tmp_path):
    path = copy(hf, tmp_path / "hf")
    file = path / "model.safetensors"
    folder = hffolder.open_folder(path)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(UserError, match="cut short"):
        to_mm(path, tmp_path / "mm")
    assert folder.nbytes > 0 and not (tmp_path / "mm").exists()


def test_the_tracker_comes_last(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm")
    assert (mm / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((mm / "model.json").read_text())["text_decoder"]["pipeline_num_layers"] == [4]
    stamps = [
        (mm / name).stat().st_mtime_ns
        for name in ("release/manifest.json", "model.json", "latest_checkpointed_iteration.txt")
    ]
    assert stamps == sorted(stamps)
