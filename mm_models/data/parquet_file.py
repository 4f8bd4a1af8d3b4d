"""A Parquet file by row: the row group last read stays in memory. See `files` for what is refused."""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from mm_models.data.stamps import stamp
from mm_models.errors import UserError

END = 1 << 16
"""Bytes at the end of a file that are looked at to see whether it has changed."""


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
        file.seek(-min(END, path.stat().st_size), os.SEEK_END)
        return zlib.crc32(file.read())
