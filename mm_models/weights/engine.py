"""Runs a plan: every slab is read once and written to every target that wants it, by `jobs` threads with fixed buffers.

`preadv`, `pwrite`, `zlib.crc32` and numpy copies release the GIL, so threads are enough; files are never mapped (mapped
pages count as resident memory). On the way the CRC-32 of every target tensor is computed, and that of every source tensor
whose manifest states one is checked, from the pieces in whatever order they come. Equal bytes are summed once: a tensor
replicated over TP costs one CRC.

Target files must exist at full size; `execute` fills them and syncs them to disk.
"""

from __future__ import annotations

import os
import resource
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mm_models.errors import UserError
from mm_models.weights.crc import combine_all
from mm_models.weights.dtypes import itemsize, torch_dtype
from mm_models.weights.plan import Fragment, Plan, Read, Slab, Write

TILE = 128
"""Rows and columns of a matrix that are turned at once."""

Pieces = dict[int, list[tuple[int, int, int]]]
"""Fragment number -> (address, length, crc) of what has been seen of it."""


@dataclass
class Result:
    """Bytes moved, the CRC-32 of every target fragment (by number in the plan), and the workers that did it."""

    bytes_read: int = 0
    bytes_written: int = 0
    crcs: dict[int, int] = field(default_factory=dict)
    workers: Sequence[Worker] = ()


def default_jobs() -> int:
    return min(8, os.cpu_count() or 1)


def execute(
    plan: Plan,
    *,
    jobs: int | None = None,
    crc: bool = True,
    progress: Callable[[int], None] | None = None,
    worker: type[Worker] | None = None,
) -> Result:
    """Carry out `plan`. `crc` asks for the targets' CRCs; sources that state theirs are verified in any case.

    `progress` is called with the bytes read since the last call. `worker` may be a `Worker` that does something else with
    what it cuts than write it. A source whose CRC differs, or a file shorter than its header says, is refused by name.
    """
    make = worker or Worker
    files = _Files(plan, make.target_flags)
    try:
        workers = [make(plan, files, crc) for _ in range(max(1, jobs or default_jobs()))]
        slabs, lock = iter(plan.slabs), threading.Lock()
        failed = threading.Event()

        def work(one: Worker) -> None:
            try:
                while not failed.is_set():
                    with lock:
                        slab = next(slabs, None)
                    if slab is None:
                        return
                    done = one.run(slab)
                    if progress:
                        with lock:
                            progress(done)
            except BaseException:
                failed.set()
                raise

        if len(workers) == 1:
            work(workers[0])
        else:
            with ThreadPoolExecutor(len(workers)) as pool:
                outcomes = [pool.submit(work, one) for one in workers]
                try:
                    for outcome in outcomes:
                        outcome.result()
                except BaseException:  # an interrupt reaches this thread alone: the others must not go on to the end
                    failed.set()
                    raise
        files.sync(len(workers))
    finally:
        files.close()
    return _result(plan, workers, crc)


def _result(plan: Plan, workers: list[Worker], crc: bool) -> Result:
    result = Result(sum(w.bytes_read for w in workers), sum(w.bytes_written for w in workers), workers=workers)
    for number, pieces in _merged([w.source_crcs for w in workers]).items():
        source = plan.sources[number]
        found = combine_all(pieces, start=source.data_start, length=source.nbytes)
        if found is not None and found != source.crc:
            raise UserError(
                f"{source.label}: CRC-32 is {found:08x}, the manifest says {source.crc:08x}: "
                "the file is damaged or was changed. Restore it and convert again."
            )
    for number, pieces in _merged([w.target_crcs for w in workers]).items() if crc else ():
        target = plan.targets[number]
        found = combine_all(pieces, start=0, length=target.nbytes)
        assert found is not None, f"{target.label}: pieces do not tile it"
        result.crcs[number] = found
    return result


def _merged(parts: Sequence[Pieces]) -> Pieces:
    merged: Pieces = {}
    for part in parts:
        for number, pieces in part.items():
            merged.setdefault(number, []).extend(pieces)
    return merged


class _Files:
    """Open descriptors of a plan's files, by fragment."""

    def __init__(self, plan: Plan, target_flags: int):
        self._open: dict[tuple[Path, int], int] = {}
        _raise_file_limit(len({f.file for f in (*plan.sources, *plan.targets)}))
        self.sources = [self._descriptor(f, os.O_RDONLY) for f in plan.sources]
        self.targets = [self._descriptor(f, target_flags) for f in plan.targets]

    def _descriptor(self, fragment: Fragment, flags: int) -> int | None:
        if fragment.file is None:
            return None
        key = (fragment.file, flags)
        if key not in self._open:
            self._open[key] = os.open(fragment.file, flags)
        return self._open[key]

    def sync(self, jobs: int) -> None:
        written = [fd for (_, flags), fd in self._open.items() if flags == os.O_WRONLY]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(os.fsync, written))

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)


class Worker:
    """One thread's buffers and tallies."""

    target_flags = os.O_WRONLY

    def __init__(self, plan: Plan, files: _Files, crc: bool):
        self.plan, self.files, self.crc = plan, files, crc
        self.bytes_read = self.bytes_written = 0
        self.source_crcs: Pieces = {}
        self.target_crcs: Pieces = {}
        self._in, self._out = _Buffer(), _Buffer()

    def run(self, slab: Slab) -> int:
        """Read, cut, write one slab; returns the bytes read."""
        if slab.turns:
            return self._turn(slab)
        held = self._read(slab)
        alike: dict[
            tuple, list[Write]
        ] = {}  # targets that take the same columns get the same bytes: cut and summed once
        for write in slab.writes:
            alike.setdefault((write.parts, self.plan.targets[write.target].dtype), []).append(write)
        for (parts, dtype), writes in alike.items():
            data = self._assemble(slab, held, parts, dtype, writes[0].rows)
            crc = zlib.crc32(data) if self.crc else None
            for write in writes:
                if write.rows == 1 or write.stride == write.width:
                    self._deliver(write.target, write.offset, data, crc)
                    continue
                for row in range(write.rows):  # rows that are only part of the target's rows
                    part = data[row * write.width : (row + 1) * write.width]
                    self._deliver(
                        write.target, write.offset + row * write.stride, part, zlib.crc32(part) if self.crc else None
                    )
        return sum(read.nbytes for read in slab.reads)

    def _turn(self, slab: Slab) -> int:
        """Put a matrix together, or read the matrices that lie side by side; transpose and write."""
        size, (first, *others) = itemsize(slab.dtype), slab.turns
        rows, columns = first.rows, slab.reads[0].width // size if others else first.columns
        matrix = np.frombuffer(self._in.take(rows * columns * size), dtype=np.uint8).reshape(rows, columns * size)
        for read, (row, col) in zip(slab.reads, [(0, 0)] if others else first.places, strict=True):
            self._fetch(read, matrix[row : row + read.rows, col * size : col * size + read.width])
        for turn in slab.turns:
            at = turn.places[0][1] * size if others else 0
            target = self.plan.targets[turn.target]
            data = self._transposed(matrix[:, at : at + turn.columns * size], size)
            data = self._cast(data, slab.dtype, target.dtype)
            self._deliver(turn.target, turn.offset, data, zlib.crc32(data) if self.crc else None)
        return sum(read.nbytes for read in slab.reads)

    def _transposed(self, matrix: np.ndarray, size: int) -> memoryview:
        out = self._out.take(matrix.size)
        rows, columns = matrix.shape[0], matrix.shape[1] // size
        kind = np.dtype(f"u{size}")
        source, turned = matrix.view(kind), np.frombuffer(out, dtype=kind).reshape(columns, rows)
        for row in range(
            0, rows, TILE
        ):  # by tiles, each copied first: long strides would miss the cache at every element
            for column in range(0, columns, TILE):
                tile = source[row : row + TILE, column : column + TILE].copy()
                turned[column : column + TILE, row : row + TILE] = tile.T
        return out

    def _read(self, slab: Slab) -> list[tuple[memoryview, int]]:
        """(bytes, row length) of every read, in one buffer."""
        buffer, at, held = self._in.take(sum(read.nbytes for read in slab.reads)), 0, []
        for read in slab.reads:
            view = buffer[at : at + read.nbytes]
            self._fetch(read, np.frombuffer(view, dtype=np.uint8).reshape(read.rows, read.width))
            held.append((view, read.width))
            at += read.nbytes
        return held

    def _fetch(self, read: Read, rows: np.ndarray) -> None:
        """The bytes of `read` into `rows` (rows, width), which may be part of a wider array."""
        source = self.plan.sources[read.source]
        whole = read.whole and rows.flags.c_contiguous
        for row in range(1 if whole else read.rows):
            part = rows.reshape(-1) if whole else rows[row]
            self._take(read.source, source, memoryview(part), read.offset + row * read.stride)
        self.bytes_read += read.nbytes
        if source.crc is not None and whole:
            piece = (read.offset, read.nbytes, zlib.crc32(rows.reshape(-1)))
            self.source_crcs.setdefault(read.source, []).append(piece)

    def _take(self, number: int, source: Fragment, view: memoryview, offset: int) -> None:
        if source.memory is not None:
            view[:] = source.memory[offset : offset + len(view)]
        else:
            _read_exactly(self.files.sources[number], view, offset, source)

    def _assemble(self, slab: Slab, held, parts, dtype: str, rows: int) -> memoryview:
        """The target's rows, contiguous: a slice of what was read where that is possible, else cut together in a buffer."""
        if len(parts) == 1:
            number, first, _, width = parts[0]
            view, stride = held[number]
            if rows == 1 or (first == 0 and width == stride):
                return self._cast(view[first : first + (rows - 1) * stride + width], slab.dtype, dtype)
        total = sum(part[3] for part in parts)
        out = self._out.take(rows * total)
        whole = np.frombuffer(out, dtype=np.uint8).reshape(rows, total)
        for number, first, to, width in parts:
            view, stride = held[number]
            source = np.frombuffer(view, dtype=np.uint8)[first:]
            whole[:, to : to + width] = np.lib.stride_tricks.as_strided(source, (rows, width), (stride, 1))
        return self._cast(out, slab.dtype, dtype)

    def _cast(self, data: memoryview, have: str, want: str) -> memoryview:
        if have == want:
            return data
        import torch

        cast = torch.frombuffer(bytearray(data), dtype=torch_dtype(have)).to(torch_dtype(want))
        return memoryview(cast.view(torch.uint8).numpy())

    def _deliver(self, number: int, offset: int, data: memoryview, crc: int | None) -> None:
        target = self.plan.targets[number]
        if target.memory is not None:
            target.memory[target.offset + offset : target.offset + offset + len(data)] = data
        else:
            _write_exactly(self.files.targets[number], data, target.offset + offset)
        if crc is not None:
            self.target_crcs.setdefault(number, []).append((offset, len(data), crc))
        self.bytes_written += len(data)


class _Buffer:
    """A reusable byte buffer that grows to the largest request."""

    def __init__(self):
        self._bytes = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> memoryview:
        if self._bytes.size < size:
            self._bytes = np.empty(size, dtype=np.uint8)
        return memoryview(self._bytes)[:size]


def _read_exactly(fd: int, view: memoryview, offset: int, source: Fragment) -> None:
    while len(view):
        got = os.preadv(fd, [view], offset)
        if got == 0:
            raise UserError(
                f"{source.label}: {source.file} ends at byte {offset}, {len(view)} more were expected: the file is cut short."
            )
        view, offset = view[got:], offset + got


def _write_exactly(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _raise_file_limit(wanted: int) -> None:
    """Large layouts have more files than the usual soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
