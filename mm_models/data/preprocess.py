"""Every row examined before training, its samples written to one Arrow file.

Rows are examined in chunks of `preprocessing_batch_size`, in the main process, or in `preprocessing_num_workers`
processes when there is more than one chunk; never more processes than cores. The file does not depend on their number.
At no time are more than a few chunks in memory.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data import store
from mm_models.data.examine import Examiner
from mm_models.data.files import RowFiles
from mm_models.data.report import LISTED, Counts, Places, refuse
from mm_models.data.selection import Selection
from mm_models.data.stamps import Stamp
from mm_models.data.workers import ordered

KEYS = "basic_parameters.preprocessing_num_workers or preprocessing_batch_size"


@dataclasses.dataclass(frozen=True)
class Task:
    """Some rows, half-open."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"rows {self.start}-{self.end - 1}"


@dataclasses.dataclass(kw_only=True)
class Chunk:
    """What became of the rows of a task."""

    batch: bytes
    kept: list[int]
    tokens: int
    labelled: int
    images: int
    dropped: list[tuple[int, str]]
    notes: list[tuple[int, str]]
    faults: list[tuple[int, str]]
    stamps: dict[Path, Stamp]


def preprocess(
    config: DataConfig, selection: Selection, *, examiner: Examiner, decode: bool, path: Path
) -> tuple[Counts, dict[Path, Stamp]]:
    """Examine the rows and write the samples to `path`. Also returns what the image files looked like.

    `examiner` serves the main process, workers load their own. Raises one error for all rows that are refused.
    """
    basic, files = config.dataset_param.basic_parameters, selection.files
    size = basic.preprocessing_batch_size
    tasks = [
        Task(at, min(at + size, span.stop)) for span in selection.spans for at in range(span.start, span.stop, size)
    ]
    places = Places(files=files.paths, starts=files.starts)
    total = len(selection)
    processes = worker_count(basic.preprocessing_num_workers, len(tasks))
    kept, sums = [0] * len(files.paths), [0, 0, 0]
    dropped: dict[str, list[int]] = {}
    notes: dict[str, list[int]] = {}
    faults: list[tuple[int, str]] = []
    stamps: dict[Path, Stamp] = {}
    if processes:
        arguments = (config, files, decode)
        chunks = ordered(tasks, processes=processes, start=ChunkExaminer.load, arguments=arguments, keys=KEYS)
    else:
        chunks = map(ChunkExaminer(files, examiner), tasks)
    with store.Writer(path) as writer, _progress(total) as advance:
        for task, chunk in zip(tasks, chunks, strict=True):
            writer.write(chunk.batch)
            for row in chunk.kept:
                kept[places.file_of(row)] += 1
            sums = [
                left + right for left, right in zip(sums, (chunk.tokens, chunk.labelled, chunk.images), strict=True)
            ]
            for found, reasons in ((chunk.dropped, dropped), (chunk.notes, notes)):
                for row, reason in found:
                    reasons.setdefault(reason, []).append(row)
            faults += [
                (row, reason if len(faults) + index < LISTED else "")
                for index, (row, reason) in enumerate(chunk.faults)
            ]
            for source, stamp in chunk.stamps.items():
                stamps.setdefault(source, stamp)
            advance(task.end - task.start)
    refuse(places, total, faults)
    tokens, labelled, images = sums
    counts = Counts(
        starts=files.starts,
        rows=total,
        kept=tuple(kept),
        tokens=tokens,
        labelled=labelled,
        images=images,
        dropped=dropped,
        notes=notes,
    )
    return counts, stamps


def worker_count(asked: int | None, tasks: int) -> int:
    """Processes that examine rows; 0 is the main process alone."""
    return 0 if not asked or tasks < 2 else min(asked, tasks, cores())


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ChunkExaminer:
    """Examines the rows of a task."""

    def __init__(self, files: RowFiles, examiner: Examiner):
        self._files, self._examiner = files, examiner

    @classmethod
    def load(cls, config: DataConfig, files: RowFiles, decode: bool) -> ChunkExaminer:
        return cls(files, Examiner.load(config, decode=decode))

    def __call__(self, task: Task) -> Chunk:
        self._examiner.stamps.clear()
        outcomes = [self._examiner.examine(row, self._files.read(row)) for row in range(task.start, task.end)]
        samples = [outcome.sample for outcome in outcomes if outcome.sample]
        return Chunk(
            batch=store.to_bytes(store.encode(samples)),
            kept=[sample.id for sample in samples],
            tokens=sum(len(sample.ids) for sample in samples),
            labelled=sum(sample.labelled for sample in samples),
            images=sum(len(sample.images) for sample in samples),
            dropped=[(outcome.row, outcome.dropped) for outcome in outcomes if outcome.dropped],
            notes=[(outcome.row, note) for outcome in outcomes for note in outcome.notes],
            faults=[(outcome.row, outcome.fault) for outcome in outcomes if outcome.fault],
            stamps=dict(self._examiner.stamps),
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], Any]]:
    """A bar over the rows, on the terminal of the first rank alone."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("examining rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
