"""What the tests of the launch scripts share: a place with spaces in its path, scripts run there, how the field reads a log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.data import kit

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "glm4.5v"
CLOSING = ("Elapsed Time Per iteration (ms): ", "Average Samples per Second: ")
PASSED_ON = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "PYTHONPATH", "TMPDIR", "LD_LIBRARY_PATH")

FIELD_STEP_TIME = """grep "elapsed time per iteration" "$1" |
awk -F 'elapsed time per iteration [(]ms[)]:' '{print$2}' | awk -F '|' '{print$1}' |
head -n 200 | tail -n 100 | awk '{sum+=$1} END {if (NR != 0) printf("%.1f",sum/NR)}'"""
FIELD_GBS = """grep "global batch size" "$1" |
awk -F 'global batch size:' '{print$2}' | awk -F '|' '{print$1}' | head -n 1 | awk '{print $1}'"""
"""How the field's scripts read a log."""


def make_place(folder: Path, family: str = "glm4v_moe", template: str = "glm4v_moe") -> Path:
    """`folder`/with spaces, which holds a small model `h f` (bf16) of the quickstart and `da ta/data.json`."""
    place = folder / "with spaces"
    place.mkdir()
    checkpoint, data = kit.quickstart("make_checkpoint"), kit.quickstart("make_data")
    checkpoint.write_checkpoint(place / "h f", family=family, dtype=checkpoint.DTYPES["bf16"])
    data.write_data(place / "da ta", place / "h f", template)
    return place


def mm_models(folder: Path, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "mm_models.cli.models", *arguments], cwd=folder, check=True, capture_output=True
    )


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The variables alone: nothing of a launcher around the tests comes through."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def script(
    folder: Path, name: str | Path, *arguments: str, timeout: float = 280, **variables: str
) -> subprocess.CompletedProcess:
    """Run a script, one of GLM-4.5V's unless its whole path is given, in `folder`."""
    return subprocess.run(
        ["bash", EXAMPLE / name, *arguments],
        cwd=folder,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def refused(done: subprocess.CompletedProcess, *texts: str) -> None:
    assert done.returncode != 0
    assert not any(line in done.stdout for line in (*CLOSING, "training ended")), done.stdout
    for text in texts:
        assert text in done.stderr + done.stdout, done.stderr


def shell(command: str, path: Path) -> str:
    return subprocess.run(["bash", "-c", command, "bash", path], check=True, capture_output=True, text=True).stdout


def wait_for(condition, process: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "ended early"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)


def running(marker: str) -> list[str]:
    """Command lines of processes that hold `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text and int(path.parent.name) != os.getpid():
            found.append(text)
    return found
