"""Rows of data files by number, without reading a file into memory.

    JSON      one array; name anything but .jsonl and .parquet
    JSONL     one value per line (.jsonl); blank lines are no rows
    Parquet   one row per record (.parquet)

`RowFiles.open` reads each file once, in windows, and keeps two byte offsets a row (Parquet: the row counts of its row
groups); `read` parses one row. Rows are numbered through all files in the order named: the second file starts where the
first ends. The object is small and picklable; each process opens the files for itself.

Refused, with file and line: text that is not UTF-8 or not JSON, a JSON file that is no array, a file without rows, a
file named twice.
"""

from __future__ import annotations

import codecs
import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from mm_models.errors import UserError

WINDOW = 1 << 22
"""Bytes read at a time; only a single row that is longer needs more."""
BOM = codecs.BOM_UTF8
SPACE = " \t\n\r"


def find_file(dataset: str, dataset_dir: str) -> Path:
    """`dataset` relative to the working directory, else to `dataset_dir`."""
    choices = (Path(dataset), Path(dataset_dir, dataset))
    for path in choices:
        if path.is_file():
            return path
    raise UserError(
        f"dataset {dataset!r}: no such file; looked at {' and '.join(str(path.absolute()) for path in choices)}."
    )


def find_files(names: Sequence[str], dataset_dir: str) -> tuple[Path, ...]:
    """Each name as `find_file` finds it; the same file twice is refused."""
    paths = tuple(find_file(name, dataset_dir) for name in names)
    seen: dict[Path, str] = {}
    for name, path in zip(names, paths, strict=True):
        if path.resolve() in seen:
            raise UserError(
                f"dataset names {str(path)!r} twice ({seen[path.resolve()]!r} and {name!r}). "
                "To draw its rows more often, name it once and give it a weight in dataset_weights."
            )
        seen[path.resolve()] = name
    return paths


class RowFiles:
    """Rows by number through all files."""

    def __init__(self, files: Sequence[JsonFile | ParquetFile]):
        self._files = tuple(files)
        self.starts = tuple(accumulate((len(file) for file in files), initial=0))
        """The number of each file's first row, and of the row after the last."""

    @classmethod
    def open(cls, paths: Sequence[Path], *, limit: int | None = None) -> RowFiles:
        """Index the files; with `limit` no more than the first so many rows of all."""
        files = []
        left = limit
        for path in paths:
            file = (ParquetFile if path.suffix == ".parquet" else JsonFile)(path, limit=left)
            if not len(file) and left != 0:
                raise UserError(f"{path}: the file has no rows. Take it out of the list, or fill it.")
            files.append(file)
            left = None if left is None else left - len(file)
        return cls(files)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(len(file) for file in self._files)

    def __len__(self) -> int:
        return self.starts[-1]

    def origin(self, row: int) -> tuple[Path, int]:
        """The file a row is in, and its number there, from 0."""
        file = self.file_of(row)
        return self._files[file].path, row - self.starts[file]

    def file_of(self, row: int) -> int:
        """The number of the file a row is in."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return bisect_right(self.starts, row) - 1

    def read(self, row: int) -> Any:
        """The row as JSON would give it (Parquet: a dict of columns). UserError where the file has changed."""
        file = self.file_of(row)
        return self._files[file].read(row - self.starts[file])


class JsonFile:
    """A JSON array or JSONL file by byte offsets."""

    def __init__(self, path: Path, *, limit: int | None = None):
        self.path, self._file = path, None
        self._starts, self._ends = array("q"), array("q")
        scan = self._scan_lines if path.suffix == ".jsonl" else self._scan_array
        scan(limit)

    def __len__(self) -> int:
        return len(self._starts)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def read(self, row: int) -> Any:
        if self._file is None:
            self._file = self.path.open("rb")
        self._file.seek(self._starts[row])
        try:
            return json.loads(self._file.read(self._ends[row] - self._starts[row]))
        except ValueError as error:
            raise UserError(
                f"{self.path}: row {row} cannot be read any more ({error}); the file has changed since the start."
            ) from error

    def _add(self, start: int, end: int) -> None:
        self._starts.append(start)
        self._ends.append(end)

    def _scan_lines(self, limit: int | None) -> None:
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(self) >= limit:
                    return
                start = at + len(BOM) if not at and line.startswith(BOM) else at
                line, at = line.removeprefix(BOM) if not at else line, at + len(line)
                if line.strip():
                    self._check_line(line, number)
                    self._add(start, at)

    def _check_line(self, line: bytes, number: int) -> None:
        try:
            json.loads(line)
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: line {number} is not UTF-8 text ({error}).") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{self.path}: line {number} is not valid JSON: {error.msg}.") from error
        except RecursionError as error:
            raise UserError(f"{self.path}: line {number} is nested too deeply.") from error

    def _scan_array(self, limit: int | None) -> None:
        with _Window(self.path) as window:
            opening = window.skip()
            if opening == "":
                return
            if opening != "[":
                found = {"{": "dict", '"': "str"}.get(opening, "a single value")
                raise UserError(
                    f"{self.path}: got {found} at the top, expected a list of rows. "
                    "One value per line is JSONL: name the file .jsonl."
                )
            window.step()
            if window.skip() == "]":
                window.step()
                self._check_end(window)
                return
            while limit is None or len(self) < limit:
                window.skip()
                self._add(*window.value())
                mark = window.skip()
                if mark not in (",", "]"):
                    raise window.fault("Expecting ',' delimiter")
                window.step()
                if mark == "]":
                    self._check_end(window)
                    return

    def _check_end(self, window: _Window) -> None:
        if window.skip():
            raise window.fault("Extra data")


class _Window:
    """A moving piece of a JSON file as text, its place counted in bytes and lines."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("rb")
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._whole = "", 0, False
        self._byte, self._line, self._column = 0, 1, 1
        if self._file.read(len(BOM)) == BOM:
            self._byte = len(BOM)
        else:
            self._file.seek(0)

    def __enter__(self) -> _Window:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def skip(self) -> str:
        """Go over white space; the character there, or "" at the end of the file."""
        while True:
            at = self._at
            while at < len(self._text) and self._text[at] in SPACE:
                at += 1
            self._move(at)
            if at < len(self._text):
                return self._text[at]
            if self._whole:
                return ""
            self._grow(WINDOW)

    def step(self) -> None:
        """Go over one character."""
        self._move(self._at + 1)

    def value(self) -> tuple[int, int]:
        """Go over one JSON value; its bytes, half-open."""
        size = WINDOW
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._at)
                if end < len(self._text) or self._whole:
                    start = self._byte
                    self._move(end)
                    return start, self._byte
            except json.JSONDecodeError as error:
                # Text that is cut off fails at its end or with an open string; anything else is wrong for good.
                cut = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated")
                if self._whole or not cut:
                    self._move(error.pos)
                    raise self.fault(error.msg) from error
            except RecursionError as error:
                raise self.fault("nested too deeply") from error
            self._grow(size)
            size *= 2

    def fault(self, reason: str) -> UserError:
        """An error at the present place."""
        return UserError(f"{self._path}: not valid JSON, line {self._line} column {self._column}: {reason}.")

    def _move(self, end: int) -> None:
        passed = self._text[self._at : end]
        self._byte += len(passed.encode())
        lines = passed.count("\n")
        self._line += lines
        self._column = len(passed) - passed.rfind("\n") if lines else self._column + len(passed)
        self._at = end

    def _grow(self, size: int) -> None:
        data = self._file.read(size)
        self._whole = not data
        try:
            more = self._decoder.decode(data, final=self._whole)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._path}: not UTF-8 text, after line {self._line} ({error}).") from error
        self._text, self._at = self._text[self._at :] + more, 0


class ParquetFile:
    """A Parquet file by row groups; the one last read stays in memory, as Arrow."""

    def __init__(self, path: Path, *, limit: int | None = None):
        self.path = path
        meta = self._open().metadata
        self._ends = list(accumulate(meta.row_group(index).num_rows for index in range(meta.num_row_groups)))
        self._rows = meta.num_rows if limit is None else min(limit, meta.num_rows)
        self._file, self._group, self._table = None, -1, None

    def __len__(self) -> int:
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_group": -1, "_table": None}

    def read(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        if group != self._group:
            self._file = self._file or self._open()
            self._table, self._group = self._file.read_row_group(group, use_threads=False), group
        first = self._ends[group - 1] if group else 0
        return self._table.slice(row - first, 1).to_pylist()[0]

    def _open(self) -> Any:
        from pyarrow import ArrowInvalid, parquet

        try:
            return parquet.ParquetFile(self.path)
        except (ArrowInvalid, OSError) as error:
            raise UserError(f"{self.path}: not a readable Parquet file ({error}).") from error
