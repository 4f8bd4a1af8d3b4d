"""What the rows of the demo are made with: the folder, the table, and commands of this environment."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
LOSS_BOUND = 1e-4


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    got: str
    bound: str
    ok: bool


class Demo:
    """The folder everything is made in, and the rows so far."""

    def __init__(self, work: Path, console: Console):
        self.work, self.console, self.rows = work, console, []
        self.hf, self.data = work / "hf", work / "data" / "data.json"

    def add(self, what: str, bound: str, check: Callable[[], tuple[str, bool]]) -> None:
        """Run one check; a command that fails is a row that fails."""
        start = time.monotonic()
        try:
            got, ok = check()
        except (subprocess.CalledProcessError, AssertionError, KeyError) as error:  # KeyError: a run that failed before
            self.console.print(getattr(error, "stderr", None) or str(error), markup=False, highlight=False)
            got, ok = "failed, see above", False
        self.rows.append(Row(what=what, got=got, bound=bound, ok=ok))
        self.console.print(
            f"{'ok  ' if ok else 'MISS'} {what}: {got} ({time.monotonic() - start:.0f} s)", highlight=False
        )

    def prepare(self) -> None:
        if self.work.exists():
            shutil.rmtree(self.work)
        self.work.mkdir(parents=True)
        here = Path(__file__).parent
        command(sys.executable, here / "make_checkpoint.py", "--out", self.hf)
        command(sys.executable, here / "make_data.py", "--out", self.data.parent, "--checkpoint", self.hf)
        for name, flags in {"tp1pp1": [], "tp2pp2": ["--tp", "2", "--pp", "2"]}.items():
            command("mm-models", "init", "--hf", self.hf, *flags, "-o", self.work / f"{name}.json")

    def same_bytes(self, exported: Path) -> tuple[str, bool]:
        """Whether every file of the Hugging Face folder came back as it was."""
        command("mm-convert", "check", self.hf, exported)
        same = all(path.read_bytes() == (exported / path.name).read_bytes() for path in self.hf.iterdir())
        return ("same bytes in every file" if same else "files differ"), same


def torchrun(processes: int, entry: str, *words: object, metrics: Path) -> list[dict]:
    """One training; its iterations in full precision."""
    command(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, ROOT / entry, *words
    )  # fmt: skip
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def healthy(records: list[dict], steps: int) -> bool:
    """The field's criteria of a good run: a line per iteration, finite loss, a steady gradient norm, nothing skipped."""
    norms = [record["grad_norm"] for record in records]
    return (
        [record["iteration"] for record in records] == list(range(1, steps + 1))
        and all(math.isfinite(record["loss"]) for record in records)
        and all(math.isfinite(norm) and 0 < norm < 20 * norms[0] for norm in norms)
        and all(record["skipped"] == record["nans"] == 0 for record in records)
    )


def distance(left: list[dict], right: list[dict]) -> float:
    """Worst relative difference of the losses, over the same iterations."""
    assert [r["iteration"] for r in left] == [r["iteration"] for r in right]
    return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(left, right))


def command(program: str, *words: object) -> None:
    """Run a program of this environment; its output is shown only if it fails."""
    line = [str(Path(sys.executable).parent / program), *map(str, words)]
    done = subprocess.run(
        line, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode, line, done.stdout, f"{' '.join(line)}\n{done.stdout}\n{done.stderr}"
        )
