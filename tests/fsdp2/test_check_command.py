"""`pretrain_fsdp2.py`: its command line, `--check` outside torchrun, exit statuses, and that help needs nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mm_models.errors import UserError
from mm_models.fsdp2.arguments import Arguments, parse
from tests.config.fsdp2.kit import SEED
from tests.fsdp2.config_kit import tiny_folders

SCRIPT = Path(__file__).parents[2] / "pretrain_fsdp2.py"


def call(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# --- the command line -------------------------------------------------------------------------------------------------


def test_words_in_any_order():
    wanted = Arguments(
        config="c.yaml", overrides=("training.lr=1e-4", "a.b=x y"), check=True, platform="npu", world=128
    )
    words = ["c.yaml", "training.lr=1e-4", "a.b=x y"]
    for argv in (
        [*words, "--check", "--platform", "npu", "--world", "128"],
        ["--check", "--platform=npu", "--world=128", *words],
        [words[0], "--check", words[1], "--world", "128", words[2], "--platform", "npu"],
    ):
        assert parse(argv) == wanted
    assert parse(["c.yaml"]) == Arguments(config="c.yaml")


WRONG = {
    "": "required: config.yaml",
    "training.lr=1": "the configuration comes first, got 'training.lr=1'",
    "c.yaml d.yaml": "got 'd.yaml', expected section.key=value",
    "c.yaml --chek": "unknown option '--chek' in the command line; did you mean '--check'?",
    "c.yaml --train-iters 3": "unknown option '--train-iters'",
    "c.yaml --training.lr=1": "a key of the YAML has no dashes: training.lr=1",
    "c.yaml --check --check": "--check is given twice",
    "c.yaml --check --world 0": "at least 1",
    "c.yaml --check --world 012": "expected a whole number of processes",
    "c.yaml --check --world": "expected one argument",
    "c.yaml --check --platform gpu": "invalid choice: 'gpu'",
    "c.yaml --world 4": "--world says what --check judges the file for",
    "c.yaml --platform npu": "--platform says what --check judges the file for",
    "c.yaml --plat npu --check": "unknown option '--plat'",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_line_is_named(words):
    """B69."""
    with pytest.raises(UserError) as caught:
        parse(words.split())
    assert WRONG[words] in str(caught.value), caught.value


# --- the script -------------------------------------------------------------------------------------------------------


def test_help_needs_neither_torch_nor_a_second():
    code = (
        "import sys, runpy\n"
        f"sys.argv = [{str(SCRIPT)!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print('exit', end.code, sorted({'torch', 'transformers', 'megatron', 'yaml', 'pydantic'} & set(sys.modules)))\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=SCRIPT.parent, timeout=60
        )
        times.append(time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "exit 0 []" and "--platform" in done.stdout, done.stdout + done.stderr
    assert min(times) < 1, times


def test_check_outside_torchrun(tmp_path):
    """The table, "check passed" and status 0, for a platform and a number of processes that are not here; megatron stays out."""
    here = tiny_folders(tmp_path)
    done = call(
        str(SEED), "parallel.expert_parallel_size=8", "--check", "--platform", "npu", "--world", "16", cwd=here,
        NON_MEGATRON="true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "check passed"
    for line in (
        "layout: 16 processes = replicate 1 · shard 16 (auto: all 16 ranks)",
        "experts: 16 processes = copies 1 · sharded 2 (default) · ep 8",
        "  expert_parallel_size: 8",
        "environment: NON_MEGATRON=true is without effect, this target never loads megatron",
    ):
        assert lines.count(line) == 1, line
    assert not (here / "save_dir").exists()


def test_errors_are_one_line_and_status_2(tmp_path):
    here = tiny_folders(tmp_path)
    for words, text in {
        ("--check",): "error: parallel.expert_parallel_size is 16, but it must divide the world size: 1",
        ("--check", "training.lrr=1"): "error: command line: unknown key 'training.lrr', did you mean 'lr'?",
        ("--chek",): "error: unknown option '--chek'",
    }.items():
        done = call(str(SEED), *words, cwd=here)
        assert done.returncode == 2 and done.stderr.startswith(text), done.stderr
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr and "check passed" not in done.stdout
    done = call("none.yaml", "--check", cwd=here)
    assert done.returncode == 2 and done.stderr == "error: none.yaml: no such file.\n"


@pytest.mark.slow
def test_ranks_of_a_launcher_speak_once(tmp_path):
    """Under torchrun the number of processes is the launcher's, and rank 0 alone prints."""
    here = tiny_folders(tmp_path)
    words = (str(SEED), "parallel.expert_parallel_size=2", "--check")
    first, second = (call(*words, cwd=here, WORLD_SIZE="2", RANK=rank) for rank in ("0", "1"))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "layout: 2 processes" in first.stdout and second.stdout == ""
    wrong = call(*words, "training.lr=on", cwd=here, WORLD_SIZE="2", RANK="1")
    assert wrong.returncode == 2 and wrong.stderr == ""
