"""`make demo`: a small GLM-4.5V from Hugging Face format through conversion, training, resplit and export, with proof.

    python -m examples.quickstart.demo --work .demo

Makes the checkpoint and the photographs' data set, then prints one table. Exit status 1 if any row misses its bound.
Parity rows run on fresh gloo processes; training rows go through `torchrun pretrain_vlm.py`; conversions through `mm-convert`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

warnings.filterwarnings("ignore", module="megatron")  # "Apex is not installed", five times

import torch
from rich.console import Console
from rich.table import Table

from examples.quickstart.parity import Topology, compare

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
LOSS_BOUND, TENSOR_PARALLEL_BOUND = 1e-4, 1e-5
EP, SP = {"ep": 2}, {"tp": 2, "sequence_parallel": True}

TOPOLOGIES = (
    Topology(name="TP1"),
    Topology(name="TP1, bf16", dtype=torch.bfloat16),
    Topology(name="TP2·SP", processes=2, degrees=SP),
    Topology(
        name="PP2 (ViT 2+0, LLM 2+2)",
        processes=2,
        degrees={"pp": 2},
        split={"vision_layers": [2, 0], "text_layers": [2, 2]},
    ),
    Topology(
        name="PP2 (ViT 1+1, LLM 0+4)",
        processes=2,
        degrees={"pp": 2},
        split={"vision_layers": [1, 1], "text_layers": [0, 4]},
    ),
    Topology(
        name="PP2·VPP2",
        processes=2,
        degrees={"pp": 2, "vpp": 2},
        split={"vision_layers": [[1, 1], [0, 0]], "text_layers": [[0, 1], [2, 1]]},
    ),
    Topology(name="EP2", processes=2, degrees=EP),
    Topology(name="EP2, bf16", processes=2, degrees=EP, dtype=torch.bfloat16),
    Topology(name="TP2·EP2·SP", processes=4, degrees=SP | EP),
)


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
        except (subprocess.CalledProcessError, AssertionError) as error:
            self.console.print(getattr(error, "stderr", None) or str(error), markup=False, highlight=False)
            got, ok = "failed, see above", False
        self.rows.append(Row(what=what, got=got, bound=bound, ok=ok))
        self.console.print(
            f"{'ok  ' if ok else 'MISS'} {what}: {got} ({time.monotonic() - start:.0f} s)", highlight=False
        )

    # --- steps ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        if self.work.exists():
            shutil.rmtree(self.work)
        self.work.mkdir(parents=True)
        here = Path(__file__).parent
        command(sys.executable, here / "make_checkpoint.py", "--out", self.hf)
        command(sys.executable, here / "make_data.py", "--out", self.data.parent, "--checkpoint", self.hf)
        for name, flags in {"tp1pp1": [], "tp2pp2": ["--tp", "2", "--pp", "2"]}.items():
            command("mm-models", "init", "--hf", self.hf, *flags, "-o", self.work / f"{name}.json")

    def parity(self) -> None:
        from tests.harness import run

        paths = {"hf": str(self.hf), "data": str(self.data), "model": str(self.work / "tp1pp1.json")}
        for topology in TOPOLOGIES:

            def check(topology=topology) -> tuple[str, bool]:
                found = [result for result in run(compare, topology.processes, topology, paths, timeout=120) if result]
                equal, worst = all(r["equal"] for r in found), max(r["worst"] for r in found)
                loss = max(abs(r["ours"] - r["theirs"]) / abs(r["theirs"]) for r in found)
                if topology.exact:
                    return ("bit-equal" if equal else f"logits off by {worst:.1e}"), equal
                return (
                    f"logits {worst:.1e}, loss {loss:.1e}",
                    worst <= TENSOR_PARALLEL_BOUND and loss <= TENSOR_PARALLEL_BOUND,
                )

            bound = "bit-equal" if topology.exact else f"≤ {TENSOR_PARALLEL_BOUND:.0e}"
            self.add(f"logits and loss against Hugging Face: {topology.name}", bound, check)

    def conversion(self) -> None:
        def chain(*layouts: str) -> tuple[str, bool]:
            folder = self.work / "-".join(layout.replace(" ", "").replace("--", "") for layout in layouts)
            steps = [folder / str(at) for at in range(len(layouts))]
            command("mm-convert", "hf_to_mm", "--hf", self.hf, "--out", steps[0], *layouts[0].split())
            for before, after, layout in zip(steps, steps[1:], layouts[1:]):
                command("mm-convert", "resplit", "--mm", before, "--out", after, *layout.split())
            command("mm-convert", "mm_to_hf", "--mm", steps[-1], "--hf", self.hf, "--out", folder / "hf")
            command("mm-convert", "check", self.hf, folder / "hf")
            same = all(path.read_bytes() == (folder / "hf" / path.name).read_bytes() for path in self.hf.iterdir())
            return ("same bytes in every file" if same else "files differ"), same

        self.add(
            "hf → tp2·pp2·ep2 → tp1·pp4 → tp1·pp1 → hf",
            "byte-equal",
            lambda: chain("--tp 2 --pp 2 --ep 2", "--pp 4", "--tp 1"),
        )
        self.add(
            "hf → ep1 → ep2·etp2 → ep4 → pp2·vpp2 → hf",
            "byte-equal",
            lambda: chain("--tp 1", "--ep 2 --etp 2", "--ep 4", "--pp 2 --vpp 2"),
        )

    def training(self) -> None:
        runs: dict[str, list[dict]] = {}

        def unbroken(name: str, processes: int, flags: list[str]) -> tuple[str, bool]:
            runs[name] = self.train(name, processes, flags, load=self.hf)
            first, last = runs[name][0]["loss"], runs[name][-1]["loss"]
            return f"loss {first:.4f} → {last:.4f}", healthy(runs[name], STEPS) and last < first

        four = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"]
        self.add(f"{STEPS} steps at TP1·PP1 (torchrun)", "healthy, loss falls", lambda: unbroken("tp1pp1", 1, []))
        self.add(
            f"{STEPS} steps at TP2·PP2 (torchrun, 4 processes)",
            "healthy, loss falls",
            lambda: unbroken("tp2pp2", 4, four),
        )

        def agree() -> tuple[str, bool]:
            worst = distance(runs["tp1pp1"], runs["tp2pp2"])
            return f"{worst:.1e}", worst <= LOSS_BOUND

        self.add("loss of each step, TP2·PP2 against TP1·PP1", f"≤ {LOSS_BOUND:.0e}", agree)

        def resumed() -> tuple[str, bool]:
            half, folder = STEPS // 2, self.work / "runs" / "half"
            self.train("half", 4, four, load=self.hf, model="tp2pp2", steps=half)
            rest = self.train("rest", 4, four, load=folder, model="tp2pp2")
            same = [record["loss"] for record in rest] == [record["loss"] for record in runs["tp2pp2"][half:]]
            command("mm-convert", "check", self.work / "runs" / "rest", self.work / "runs" / "tp2pp2")
            return ("losses and final weights bit-equal" if same else "losses differ"), same and len(
                rest
            ) == STEPS - half

        self.add(f"resumed after {STEPS // 2} steps (torchrun, 4 processes)", "bit-equal", resumed)

        def moved() -> tuple[str, bool]:
            half, folder = STEPS // 2, self.work / "runs" / "half-tp1pp1"
            command(
                "mm-convert", "resplit", "--mm", self.work / "runs" / "half", "--out", folder, "--tp", "1", "--pp", "1"
            )
            worst = distance(self.train("moved", 1, [], load=folder, model="tp1pp1"), runs["tp1pp1"][half:])
            return f"{worst:.1e}", worst <= LOSS_BOUND

        self.add("resplit to TP1·PP1 with optimizer, then resumed (torchrun)", f"≤ {LOSS_BOUND:.0e}", moved)

        def on_disk() -> tuple[str, bool]:
            found = sorted(
                path.name for path in (self.work / "runs" / "tp2pp2" / f"iter_{STEPS:07d}").glob("mp_rank_*")
            )
            return f"{len(found)} shards", found == [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)]

        self.add("trained checkpoint split by TP and PP on disk", "4 shards", on_disk)

    def train(
        self, name: str, processes: int, flags: list[str], *, load: Path, model: str | None = None, steps: int = STEPS
    ) -> list[dict]:
        """One `torchrun pretrain_vlm.py`; its iterations in full precision."""
        folder, metrics = self.work / "runs" / name, self.work / f"{name}.jsonl"
        command(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, ROOT / "pretrain_vlm.py",
            "--mm-model", self.work / f"{model or name}.json", "--mm-data", self.data, "--load", load, "--save", folder,
            "--micro-batch-size", 1, "--global-batch-size", 4, "--train-iters", steps, "--lr-decay-iters", STEPS,
            "--lr", 3e-4, "--lr-decay-style", "cosine", "--lr-warmup-iters", 3, "--clip-grad", 1.0, "--seed", 42,
            "--use-distributed-optimizer", "--log-metrics", metrics, *flags,
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(".demo"), help="folder to make everything in; emptied first")
    work = parser.parse_args().work.resolve()
    os.environ.update(
        OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error"
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    start = time.monotonic()
    demo = Demo(work, console)
    demo.prepare()
    demo.parity()
    demo.conversion()
    demo.training()
    table = Table(title=f"mm-models demo, {time.monotonic() - start:.0f} s")
    for column in ("what", "result", "bound", ""):
        table.add_column(column)
    for row in demo.rows:
        table.add_row(row.what, row.got, row.bound, "[green]ok[/]" if row.ok else "[red]MISS[/]")
    console.print(table)
    return 0 if all(row.ok for row in demo.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
