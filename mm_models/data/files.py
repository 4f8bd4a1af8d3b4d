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
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from mm_models.data.json_file import BOM, SPACE, JsonFile
from mm_models.data.parquet_file import ParquetFile
from mm_models.errors import UserError

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
