"""A JSON array or JSONL file by row, without reading it into memory: it is read once, in windows, and two byte offsets and
a checksum are kept of each row. See `files` for what is refused."""

from __future__ import annotations

import codecs
import json
import zlib
from array import array
from pathlib import Path
from typing import Any

from mm_models.errors import UserError

WINDOW = 1 << 22
"""Bytes read at a time; only a single row that is longer needs more."""
BOM = codecs.BOM_UTF8
SPACE = " \t\n\r"


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
