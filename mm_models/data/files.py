"""Rows of data files by number, without reading a file into memory.

    JSON      one array
    JSONL     one object per line; blank lines are no rows
    Parquet   one row per record

The content says which it is; the name (.jsonl, .parquet) only where the content leaves it open. `RowFiles.open` reads
each file once, in windows, and keeps two byte offsets a row (Parquet: the row counts of its row groups); `read` parses
one row. Rows are numbered through all files in the order named: the second file starts where the first ends. The object
is small and picklable; each process opens the files for itself.

Refused, with file and line or row: text that is not UTF-8 or not JSON, a key twice in one object, a file of another
kind, a file without rows, a file named twice, and, when a row is read, a file that has changed since it was opened.
"""

from __future__ import annotations

import codecs
import json
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from mm_models.data.stamps import stamp
from mm_models.errors import UserError

WINDOW = 1 << 22
"""Bytes read at a time; only a single row that is longer needs more."""
BOM = codecs.BOM_UTF8
SPACE = " \t\n\r"
HEAD = 1 << 16
"""Bytes that are looked at to see what a file is."""
PARQUET = b"PAR1"
OTHERS = {
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it first",
    b"BZh": "a bzip2 archive; unpack it first",
    b"\xfd7zXZ": "an xz archive; unpack it first",
    b"ARROW1": "an Arrow file; write it as Parquet",
    codecs.BOM_UTF16_LE: "UTF-16 text; write it as UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text; write it as UTF-8",
}
"""What files that are no rows begin with."""


def find_file(dataset: str, dataset_dir: str) -> Path:
    """`dataset` relative to the working directory, else to `dataset_dir`."""
    choices = (Path(dataset), Path(dataset_dir, dataset))
    for path in choices:
        try:
            if path.is_file():
                return path
        except OSError as error:  # a name too long, a folder that may not be read
            raise UserError(f"dataset {dataset!r}: {error.strerror}.") from error
    folder = next((path for path in choices if path.is_dir()), None)
    if folder is not None:
        raise UserError(f"dataset {dataset!r}: {folder.absolute()} is a folder; name the files in it.")
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
            file = _open(path, limit=left)
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


def _open(path: Path, *, limit: int | None) -> JsonFile | ParquetFile:
    """The file as what its first bytes show it to be."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    if head.startswith(PARQUET) or path.suffix == ".parquet":
        return ParquetFile(path, limit=limit)
    for magic, kind in OTHERS.items():
        if head.startswith(magic):
            raise UserError(f"{path}: {kind}.")
    if b"\0" in head[:4]:
        raise UserError(f"{path}: UTF-16 text or binary content, expected UTF-8.")
    first = head.removeprefix(BOM).lstrip(SPACE.encode())[:1]
    lines = first == b"{" or (path.suffix == ".jsonl" and first != b"[")
    return JsonFile(path, lines=lines, limit=limit)


class JsonFile:
    """A JSON array, or with `lines` a JSONL file, by byte offsets and a checksum per row."""

    def __init__(self, path: Path, *, lines: bool, limit: int | None = None):
        self.path, self._file = path, None
        self._starts, self._ends, self._sums = array("q"), array("q"), array("I")
        scan = self._scan_lines if lines else self._scan_array
        scan(limit)

    def __len__(self) -> int:
        return len(self._starts)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def read(self, row: int) -> Any:
        try:
            if self._file is None:
                self._file = self.path.open("rb")
            self._file.seek(self._starts[row])
            data = self._file.read(self._ends[row] - self._starts[row])
        except OSError as error:
            raise UserError(f"{self.path}: row {row} cannot be read any more ({error.strerror}).") from error
        if zlib.crc32(data) != self._sums[row]:
            raise UserError(f"{self.path}: row {row} has changed since the start. Start again.")
        try:
            return json.loads(data.decode(), object_pairs_hook=_once)
        except _Twice as error:
            raise UserError(f"{self.path}: row {row} has the key {error} twice in one object; keep one.") from error

    def _add(self, start: int, data: bytes) -> None:
        self._starts.append(start)
        self._ends.append(start + len(data))
        self._sums.append(zlib.crc32(data))

    def _scan_lines(self, limit: int | None) -> None:
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(self) >= limit:
                    return
                end = at + len(line)
                line = line if at else line.removeprefix(BOM)
                if line.strip():
                    self._check_line(line, number)
                    self._add(end - len(line), line)
                at = end

    def _check_line(self, line: bytes, number: int) -> None:
        try:
            json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: line {number} is not UTF-8 text ({error}).") from error
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.path}: line {number} is not valid JSON: {error.msg}. In JSONL each line is one row."
            ) from error
        except ValueError as error:
            raise UserError(f"{self.path}: line {number} is not valid JSON: {_number(error)}.") from error
        except RecursionError as error:
            raise UserError(f"{self.path}: line {number} is nested too deeply.") from error

    def _scan_array(self, limit: int | None) -> None:
        with _Window(self.path) as window:
            opening = window.skip()
            if opening == "":
                return
            if opening != "[":
                raise UserError(
                    f"{self.path}: begins with {opening!r}, expected a list of rows, [{{...}}, ...], one object per "
                    "line, or Parquet."
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


class _Twice(Exception):
    """A key that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; JSON readers keep the last of two equal keys, and lose the other's value unseen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(repr(next(key for key in found if keys.count(key) > 1)))
    return found


def _number(error: ValueError) -> str:
    """Why Python reads no such number: too many digits."""
    return str(error).partition(";")[0]


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

    def value(self) -> tuple[int, bytes]:
        """Go over one JSON value: where it starts, in bytes, and the bytes."""
        size = WINDOW
        while True:
            try:
                _, end = self._json.raw_decode(self._text, self._at)
                if end < len(self._text) or self._whole:
                    start = self._byte
                    return start, self._move(end)
            except json.JSONDecodeError as error:
                # Text that is cut off fails at its end or with an open string; anything else is wrong for good.
                cut = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated")
                if self._whole or not cut:
                    self._move(error.pos)
                    raise self.fault(error.msg) from error
            except ValueError as error:
                raise self.fault(_number(error)) from error
            except RecursionError as error:
                raise self.fault("nested too deeply") from error
            self._grow(size)
            size *= 2

    def fault(self, reason: str) -> UserError:
        """An error at the present place."""
        return UserError(f"{self._path}: not valid JSON, line {self._line} column {self._column}: {reason}.")

    def _move(self, end: int) -> bytes:
        passed = self._text[self._at : end]
        data = passed.encode()
        self._byte += len(data)
        lines = passed.count("\n")
        self._line += lines
        self._column = len(passed) - passed.rfind("\n") if lines else self._column + len(passed)
        self._at = end
        return data

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
        self.path, self._stamp, self._footer = path, stamp(path), _footer(path)
        meta = self._open().metadata
        self._ends = list(accumulate(meta.row_group(index).num_rows for index in range(meta.num_row_groups)))
        self._rows = meta.num_rows if limit is None else min(limit, meta.num_rows)
        self._file, self._group, self._table = None, -1, None

    def __len__(self) -> int:
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_group": -1, "_table": None}

    def read(self, row: int) -> dict[str, Any]:
        from pyarrow import ArrowException

        if (now := stamp(self.path)) != self._stamp:
            if now[0] != self._stamp[0] or _footer(self.path) != self._footer:
                raise UserError(f"{self.path}: the file has changed since the start. Start again.")
            self._stamp = now  # touched, or written again as it was
        group = bisect_right(self._ends, row)
        first = self._ends[group - 1] if group else 0
        try:
            if group != self._group:
                self._file = self._file or self._open()
                self._table, self._group = self._file.read_row_group(group, use_threads=False), group
            return self._table.slice(row - first, 1).to_pylist()[0]
        except (OSError, ValueError, OverflowError, ArrowException) as error:  # broken pages, text that is not UTF-8
            raise UserError(f"{self.path}: row {row} cannot be read ({str(error).strip()}).") from error

    def _open(self) -> Any:
        from pyarrow import ArrowException, parquet

        try:
            file = parquet.ParquetFile(self.path, page_checksum_verification=True)
            names = file.schema_arrow.names
        except (ArrowException, OSError, ValueError) as error:
            raise UserError(f"{self.path}: not a readable Parquet file ({error}).") from error
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"{self.path}: several columns named {', '.join(map(repr, twice))}; keep one of each.")
        return file


def _footer(path: Path) -> int:
    """A checksum of the end of a Parquet file, which says where its pages are and what is in them."""
    with path.open("rb") as file:
        file.seek(-min(HEAD, path.stat().st_size), os.SEEK_END)
        return zlib.crc32(file.read())
