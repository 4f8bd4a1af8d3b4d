"""Spans: runs of rows of a placement, their cuts, and targets whose bytes are transposed against their sources.

A `Span` is a run of rows of one placement. A target of the other byte order (`height` > 0) is cut into its matrices, and a
matrix into runs of columns small enough for a buffer: those are consecutive bytes of the target. Each is put together in
memory from rectangles of the sources, then turned and written in one piece, so that its CRC is one piece too.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Span:
    """A run of rows of one placement: global rows [row, row+rows) x columns [col, col+width), local address alike.

    `height` > 0 is the number of rows of each matrix of a stored tensor whose bytes go column by column.
    """

    fragment: int
    row: int
    rows: int
    local_row: int
    col: int
    width: int
    local_col: int
    local_width: int
    height: int = 0

    def by_matrix(self) -> list[Span]:
        """The same rows, cut where one stored matrix ends and the next begins."""
        found, at = [], 0
        while at < self.rows:
            rows = min(self.rows - at, self.height - (self.local_row + at) % self.height)
            found.append(replace(self, row=self.row + at, local_row=self.local_row + at, rows=rows))
            at += rows
        return found


def segments(held: list[Span], wanted: list[Span]):
    """Runs of rows between two cuts: (first row, end row, sources there, targets there)."""
    cuts = sorted({edge for span in (*held, *wanted) for edge in (span.row, span.row + span.rows)})
    held, wanted = sorted(held, key=lambda s: (s.row, s.col)), sorted(wanted, key=lambda s: (s.row, s.col))
    active: list[Span] = []
    takers: list[Span] = []
    next_held = next_wanted = 0
    for low, high in itertools.pairwise(cuts):
        active = [span for span in active if span.row + span.rows > low]
        takers = [span for span in takers if span.row + span.rows > low]
        while next_held < len(held) and held[next_held].row <= low:
            active.append(held[next_held])
            next_held += 1
        while next_wanted < len(wanted) and wanted[next_wanted].row <= low:
            takers.append(wanted[next_wanted])
            next_wanted += 1
        yield low, high, active, takers


def taken(span: Span, takers: list[Span]) -> int:
    """How many of a source's columns some target takes."""
    columns, end = 0, span.col
    for low, high in sorted((max(t.col, span.col), min(t.col + t.width, span.col + span.width)) for t in takers):
        if high > max(low, end):
            columns += high - max(low, end)
            end = high
    return columns


def wanted_columns(span: Span, takers: list[Span]) -> tuple[int, int]:
    """(first column, columns) of a source that some target takes, and what lies between."""
    pieces = [(max(t.col, span.col), min(t.col + t.width, span.col + span.width)) for t in takers]
    pieces = [(first, last) for first, last in pieces if first < last]
    first, last = min(first for first, _ in pieces), max(last for _, last in pieces)
    return first, last - first


# --- transposed targets --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """A matrix of `rows` x `columns` elements that is transposed and written at `offset` bytes behind element 0 of target
    number `target`. `places` are (first row, first column) of what each of the slab's reads fills of it; of matrices that
    share a read, (0, first column of the read)."""

    target: int
    offset: int
    rows: int
    columns: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a source, by global row and column, and where in the matrix it belongs."""

    span: Span
    source_row: int
    source_col: int
    row: int
    col: int
    rows: int
    width: int


def swapped(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """A shape or an index with its last two dimensions swapped."""
    return (*numbers[:-2], numbers[-1], numbers[-2])


def turned_slabs(
    held: list[Span], wanted: list[Span], elements: int, itemsize: int
) -> Iterator[tuple[Turn, list[Part]]]:
    """The matrices of `wanted`, each at most `elements` elements (one column excepted), and the parts of `held` in them.

    `itemsize` is the targets'.
    """
    held = sorted(held, key=lambda span: span.row)
    starts, tallest = [span.row for span in held], max(span.rows for span in held)
    matrices: dict[tuple[int, int], list[Span]] = {}
    for span in wanted:
        matrices.setdefault((span.fragment, span.local_row // span.height), []).append(span)
    for (target, matrix), spans in matrices.items():
        height, width = spans[0].height, spans[0].local_width
        parts = [part for span in spans for part in _parts(span, held, starts, tallest)]
        each = max(1, elements // height)
        for first in range(0, width, each):
            columns = min(each, width - first)
            inside = [clipped for part in parts if (clipped := _clip(part, first, columns))]
            offset = (matrix * width + first) * height * itemsize
            yield Turn(target, offset, height, columns, tuple((part.row, part.col) for part in inside)), inside


def _parts(span: Span, held: list[Span], starts: list[int], tallest: int) -> Iterator[Part]:
    for source in held[
        bisect.bisect_left(starts, span.row - tallest) : bisect.bisect_left(starts, span.row + span.rows)
    ]:
        row, end = max(span.row, source.row), min(span.row + span.rows, source.row + source.rows)
        col, stop = max(span.col, source.col), min(span.col + span.width, source.col + source.width)
        if row < end and col < stop:
            local_row = (span.local_row + row - span.row) % span.height
            yield Part(source, row, col, local_row, span.local_col + col - span.col, end - row, stop - col)


def _clip(part: Part, first: int, columns: int) -> Part | None:
    """What of a part lies in columns [first, first+columns) of the matrix, counted from there."""
    low, high = max(part.col, first), min(part.col + part.width, first + columns)
    if low >= high:
        return None
    return replace(part, source_col=part.source_col + low - part.col, col=low - first, width=high - low)


def side_by_side(found: Iterable[tuple[Turn, list[Part]]], elements: int) -> Iterator[list[tuple[Turn, list[Part]]]]:
    """The matrices, in groups of one, or of all that together are whole rows of one source, of at most `elements` elements."""
    alike: dict[tuple, list[tuple[Turn, list[Part]]]] = {}
    for turn, parts in found:
        part = parts[0] if len(parts) == 1 else None
        single = (
            part and (part.rows, part.width) == (turn.rows, turn.columns) and part.span.width == part.span.local_width
        )
        key = (part.span, part.source_row, part.rows) if single else (turn.target, turn.offset)
        alike.setdefault(key, []).append((turn, parts))
    for group in alike.values():
        whole = sum(turn.columns for turn, _ in group) == group[0][1][0].span.width if group[0][1] else False
        if len(group) > 1 and whole and group[0][0].rows * group[0][1][0].span.width <= elements:
            yield [
                (replace(turn, places=((0, parts[0].source_col - parts[0].span.col),)), parts) for turn, parts in group
            ]
        else:
            yield from ([one] for one in group)
