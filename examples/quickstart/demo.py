"""`make demo`: a small GLM-4.5V from Hugging Face format through conversion, training, resplit and export, on both targets, with proof.

    python -m examples.quickstart.demo --work .demo

Makes the checkpoint and the photographs' data set, then prints one table. Exit status 1 if any row misses its bound.
Parity rows run on fresh gloo processes; training rows go through `torchrun`; conversions through `mm-convert`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", module="megatron")  # "Apex is not installed", five times

from rich.console import Console
from rich.table import Table

from examples.quickstart import demo_fsdp2, demo_megatron
from examples.quickstart.demo_kit import Demo


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
    for target in (demo_megatron, demo_fsdp2):
        target.parity(demo)
        target.conversion(demo)
        target.training(demo)
    demo_fsdp2.both_targets(demo)
    table = Table(title=f"mm-models demo, {time.monotonic() - start:.0f} s")
    for column in ("what", "result", "bound", ""):
        table.add_column(column)
    for row in demo.rows:
        table.add_row(row.what, row.got, row.bound, "[green]ok[/]" if row.ok else "[red]MISS[/]")
    console.print(table)
    return 0 if all(row.ok for row in demo.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
