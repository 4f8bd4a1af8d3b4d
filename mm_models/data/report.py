"""What became of the rows of a data set, for people."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_models.data.rows import ranges
from mm_models.errors import UserError

LISTED = 10
"""How many faults are written out with their reason before the rest is named by row alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Which file a row is in. Rows are numbered through all files; people are told the number within the file."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]
    """The first row of each file, and the row after the last."""

    def file_of(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def name(self, row: int) -> str:
        """`train.json: row 3`."""
        file = self.file_of(row)
        return f"{self.files[file]}: row {row - self.starts[file]}"

    def ranges(self, found: Sequence[int]) -> str:
        """Ascending rows, all of them and short; with the file where there is more than one."""
        if len(self.files) == 1:
            return ranges(found)
        parts = []
        for file, start in enumerate(self.starts[:-1]):
            here = [row - start for row in found if start <= row < self.starts[file + 1]]
            parts += [f"{self.files[file]} {ranges(here)}"] if here else []
        return "; ".join(parts)

    @property
    def title(self) -> str:
        return ", ".join(map(str, self.files))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What an examination found: kept rows by file, and dropped ones and noteworthy ones by reason."""

    starts: tuple[int, ...]
    """The first row of each file, and the row after the last."""
    rows: int
    """Rows examined."""
    kept: tuple[int, ...]
    """Kept rows of each file."""
    tokens: int
    labelled: int
    images: int
    dropped: dict[str, list[int]]
    notes: dict[str, list[int]]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Counts:
        """Back from `dataclasses.asdict` and JSON."""
        return cls(**value | {name: tuple(value[name]) for name in ("starts", "kept")})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`Counts` of the files at `places`, and what else there is to say."""

    places: Places
    counts: Counts
    remarks: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return self.counts.rows

    @property
    def kept(self) -> int:
        return sum(self.counts.kept)

    @property
    def images(self) -> int:
        return self.counts.images

    @property
    def dropped(self) -> dict[str, list[int]]:
        return self.counts.dropped

    @property
    def notes(self) -> dict[str, list[int]]:
        return self.counts.notes

    def summary(self) -> str:
        """The same on ranks that hold the same samples, wherever their files lie; another on ranks that do not."""
        counts = self.counts
        found = json.dumps(dataclasses.asdict(counts), sort_keys=True)
        return (
            f"{self.kept} of {self.rows} rows, {counts.tokens} tokens, {counts.labelled} of them trained, "
            f"{self.images} images ({hashlib.sha256(found.encode()).hexdigest()[:8]})"
        )

    def lines(self) -> list[str]:
        """The sum first, then a line per file where there are several, then one per reason."""
        counts, places = self.counts, self.places
        text = [
            f"data {places.title}: {self.kept} of {self.rows} rows, {counts.tokens} tokens, "
            f"{counts.labelled} of them trained, {self.images} images"
        ]
        if len(places.files) > 1:
            text += [f"data {path}: {kept} rows" for path, kept in zip(places.files, counts.kept, strict=True)]
        for title, reasons in (("dropped", self.dropped), ("note", self.notes)):
            text += [
                f"data {title}: {reason}: {len(found)} rows: {places.ranges(found)}"
                for reason, found in sorted(reasons.items())
            ]
        return text + [f"data {remark}" for remark in self.remarks]


def refuse(places: Places, total: int, faults: Sequence[tuple[int, str]]) -> None:
    """Raise one error that names every faulty row, the first with their reasons; nothing without faults."""
    if not faults:
        return
    one = len(places.files) == 1
    lines = [f"  {f'row {row}' if one else places.name(row)}: {reason}" for row, reason in faults[:LISTED]]
    rest = [row for row, _ in faults[LISTED:]]
    more = [f"  and rows {places.ranges(rest)}"] if rest else []
    raise UserError(
        "\n".join([f"{places.title}: {len(faults)} of {total} rows refused (rows are counted from 0)", *lines, *more])
    )
