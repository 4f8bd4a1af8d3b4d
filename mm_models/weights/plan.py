"""From two sides of fragments to a list of slabs: what to read, how to cut it, where to write it.

A `Fragment` is a tensor in some file (or in memory) with the placements that say which boxes of global tensors it is. A
Hugging Face folder, a checkpoint of any layout, an optimizer file and a live model are all just lists of fragments, and
moving weights between any two of them is `plan(sources, targets)`.

Every global tensor is seen as rows (all dimensions but the last) by columns. Rows are cut wherever the set of fragments
that hold them changes; between two cuts addresses are linear. A slab is a run of such rows, small enough for a buffer: its
sources are read once, only the columns that are wanted, and every target that wants the rows is written from the buffer;
only column slices (row-parallel weights) are cut in memory.

A fragment may be `transposed`: its bytes have the last two dimensions swapped. A tensor is planned in the order of its
sources' bytes; targets of the other order are cut into whole matrices (`turned`) and written in one piece each.

Refused before a byte is written: a target element that no source holds or two do, a source element that no target takes,
data types that differ inside one tensor, shapes that do not partition.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm_models.errors import UserError
from mm_models.weights.boxes import Placement, Shape, partition_fault, row_runs, volume
from mm_models.weights.dtypes import itemsize
from mm_models.weights.spans import Span, Turn, segments, side_by_side, swapped, taken, turned_slabs, wanted_columns

BLOCK = 4 << 20
"""Bytes a slab reads at most, one row excepted; a matrix to be turned may have `TURN` times as many."""
TURN = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """A stored tensor. `offset` is the byte address of its element 0 in `file`, or in `memory` (a writable byte view).

    `shape` has as many dimensions as its global tensors. A fragment that holds only the flat range `stored` of its elements
    (an optimizer moment of one data-parallel rank) has its data at `offset + start * itemsize`. `cast` lets a target take
    another data type than its source. `crc` is what the manifest says of a source. With `transposed` the bytes are those of
    the tensor with its last two dimensions swapped; `shape` and `placements` are as if they were not.
    """

    label: str
    dtype: str
    shape: Shape
    placements: tuple[Placement, ...]
    file: Path | None = None
    memory: memoryview | None = None
    offset: int = 0
    stored: tuple[int, int] | None = None
    cast: bool = False
    crc: int | None = None
    transposed: bool = False

    @property
    def elements(self) -> int:
        return volume(self.shape) if self.stored is None else self.stored[1] - self.stored[0]

    @property
    def data_start(self) -> int:
        return self.offset + (self.stored[0] * self.itemsize if self.stored else 0)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype, self.label)

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Read:
    """`rows` rows of `width` bytes, `stride` apart, from `offset` of source number `source`; what lies between is not read."""

    source: int
    offset: int
    rows: int
    stride: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    @property
    def whole(self) -> bool:
        """Whether the rows are one run of bytes."""
        return self.rows == 1 or self.stride == self.width


@dataclass(frozen=True, slots=True)
class Write:
    """`rows` rows of `width` bytes, `stride` apart, `offset` bytes behind element 0 of target number `target`: where that
    is need not be known yet, so that a plan is proven before its target files exist.

    `parts` are the columns it is made of: (read number in the slab, byte column there, byte column here, bytes), all in the
    source's data type; `width` and `stride` are in the target's.
    """

    target: int
    offset: int
    rows: int
    stride: int
    width: int
    parts: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Slab:
    """`writes` are cut from `reads`. Or one of `turns` says how a matrix is put together from them, or several which columns of
    the one read they take, to be written transposed."""

    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    dtype: str
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Slabs in the order of the source files, and the fragments they speak of. `replicas` are sources that hold what
    another one holds as well: they are not read (`keep`, `other`)."""

    sources: Sequence[Fragment]
    targets: Sequence[Fragment]
    slabs: Sequence[Slab]
    replicas: Sequence[tuple[Fragment, Fragment]]

    @property
    def bytes_read(self) -> int:
        return sum(read.nbytes for slab in self.slabs for read in slab.reads)

    @property
    def bytes_written(self) -> int:
        written = sum(write.rows * write.width for slab in self.slabs for write in slab.writes)
        turned = (turn for slab in self.slabs for turn in slab.turns)
        return written + sum(turn.rows * turn.columns * self.targets[turn.target].itemsize for turn in turned)


@dataclass
class _Tally:
    """How many elements of every fragment the plan has used, and which tensors it could not serve."""

    used: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def plan(
    sources: Iterable[Fragment],
    targets: Iterable[Fragment],
    shapes: Mapping[str, Shape],
    *,
    use_all: bool = True,
    block: int = BLOCK,
) -> Plan:
    """The slabs that fill every element of `targets` from `sources`. `shapes` are the global tensors' shapes.

    With `use_all` every source element must reach a target (a conversion); without, only what is wanted is read (one rank's load).
    """
    sources, targets = list(sources), list(targets)
    for target in targets:
        if fault := partition_fault(target.shape, [p.local_box for p in target.placements]):
            raise UserError(f"{target.label}: {fault}")
    turned = _turned(sources)
    source_spans, replicas = _spans_by_tensor(sources, shapes, turned, dedupe=True)
    target_spans, _ = _spans_by_tensor(targets, shapes, turned, dedupe=False)
    tally, slabs = _Tally(), []
    for tensor, wanted in target_spans.items():
        held = source_spans.get(tensor, [])
        if not held:
            tally.faults.append(f"{targets[wanted[0].fragment].label}: no source holds any of it")
            continue
        dtypes = {sources[span.fragment].dtype: sources[span.fragment].label for span in held}
        if len(dtypes) > 1:
            parts = " but ".join(f"{dtype} in {label}" for dtype, label in dtypes.items())
            tally.faults.append(f"{tensor}: its parts have different data types ({parts}); a converter never casts")
            continue
        cut = _turned_slabs if wanted[0].height else _tensor_slabs
        slabs += cut(tensor, held, wanted, sources, targets, tally, block)
    skipped = {id(other) for _, other in replicas}
    for number, source in enumerate(sources):
        used = tally.used.get(number, 0)
        if use_all and used != source.elements and id(source) not in skipped:
            tally.faults.append(f"{source.label}: {source.elements - used} of {source.elements} elements go nowhere")
    for number, target in enumerate(targets):
        if not tally.faults and tally.written.get(number, 0) != target.elements:
            tally.faults.append(
                f"{target.label}: {tally.written.get(number, 0)} of {target.elements} elements would be written"
            )
    if tally.faults:
        raise UserError("the weights do not fit together: " + "; ".join(_first(tally.faults)) + ".")
    order = {path: at for at, path in enumerate(dict.fromkeys(source.file for source in sources))}
    slabs.sort(key=lambda slab: (order[sources[slab.reads[0].source].file], slab.reads[0].offset))
    return Plan(sources=sources, targets=targets, slabs=slabs, replicas=replicas)


def _spans_by_tensor(fragments: list[Fragment], shapes: Mapping[str, Shape], turned: Collection[str], *, dedupe: bool):
    """All placements as spans, by global tensor; with `dedupe`, of equal boxes only the first fragment's. Tensors in
    `turned` are seen with their last two dimensions swapped."""
    spans: dict[str, list[Span]] = {}
    seen: dict[tuple, int] = {}
    replicas: dict[tuple[int, int], None] = {}
    for number, fragment in enumerate(fragments):
        for placement in fragment.placements:
            tensor = placement.tensor
            key = (tensor, placement.start, placement.extent)
            if dedupe and seen.setdefault(key, number) != number:
                replicas[seen[key], number] = None
                continue
            shape, local = shapes[tensor], fragment.shape
            start, at, extent = placement.start, placement.local, placement.extent
            if tensor in turned:
                shape, local, start, at, extent = map(swapped, (shape, local, start, at, extent))
            if len(shape) == 1:  # a vector is rows of one column
                shape, local, start, at, extent = (*shape, 1), (*local, 1), (*start, 0), (*at, 0), (*extent, 1)
            seen_as = Placement(tensor, start, at, extent)
            height = local[-2] if fragment.transposed != (tensor in turned) else 0
            for row, local_row, rows in row_runs(shape[:-1], local[:-1], seen_as):
                span = Span(number, row, rows, local_row, start[-1], extent[-1], at[-1], local[-1], height)
                spans.setdefault(tensor, []).extend(span.by_matrix() if height else [span])
    return spans, [(fragments[a], fragments[b]) for a, b in replicas]


def _turned(sources: list[Fragment]) -> set[str]:
    """Tensors whose sources' bytes have the last two dimensions swapped."""
    found = {placement.tensor for source in sources if source.transposed for placement in source.placements}
    for source in sources:
        assert source.transposed or not found & {p.tensor for p in source.placements}, f"{source.label}: two orders"
        assert not (source.transposed and source.stored), source.label
    return found


def _tensor_slabs(
    tensor: str, held: list[Span], wanted: list[Span], sources, targets, tally: _Tally, block: int
) -> list[Slab]:
    slabs: list[Slab] = []
    pending: tuple | None = None  # (signature, first row, last row, sources, targets)
    for low, high, active, takers in segments(held, wanted):
        if not takers:
            continue
        needed = _needed(tensor, active, takers, low, high, sources, targets, tally)
        if needed is None:
            return []
        signature = tuple((s.fragment, s.local_row - s.row, s.col, s.local_col, s.width) for s in (*needed, *takers))
        if pending and pending[0] == signature and pending[2] == low:
            pending = (signature, pending[1], high, pending[3], pending[4])
            continue
        if pending:
            slabs += _chop(*pending[1:], sources, targets, tally, block)
        pending = (signature, low, high, needed, takers)
    if pending:
        slabs += _chop(*pending[1:], sources, targets, tally, block)
    return slabs


def _needed(
    tensor, active: list[Span], takers: list[Span], low: int, high: int, sources, targets, tally: _Tally
) -> list[Span] | None:
    """The sources, by column, that together hold what the targets want of these rows; None after recording a fault."""
    active = sorted(active, key=lambda s: s.col)
    for one, two in itertools.pairwise(active):
        if one.col + one.width > two.col:
            tally.faults.append(
                f"{tensor} rows {low}:{high} are in both {sources[one.fragment].label} and {sources[two.fragment].label}"
            )
            return None
    needed = []
    for span in active:
        if any(span.col < t.col + t.width and t.col < span.col + span.width for t in takers):
            needed.append(span)
    for taker in takers:
        got = sum(max(0, min(taker.col + taker.width, s.col + s.width) - max(taker.col, s.col)) for s in needed)
        if got != taker.width:
            tally.faults.append(
                f"{targets[taker.fragment].label}: rows {low}:{high} of {tensor}, "
                f"{taker.width - got} of {taker.width} columns have no source"
            )
            return None
    return needed


def _turned_slabs(
    tensor: str, held: list[Span], wanted: list[Span], sources, targets, tally: _Tally, block: int
) -> list[Slab]:
    """One slab for every matrix of every target, or for as many of its columns as `TURN` blocks hold. Matrices that lie beside
    each other in one source (gate and up) share a slab, so that its bytes are read in whole rows."""
    slabs, source, limit = [], sources[held[0].fragment], TURN * block // sources[held[0].fragment].itemsize
    found = turned_slabs(held, wanted, limit, targets[wanted[0].fragment].itemsize)
    for group in side_by_side(found, limit):
        for turn, parts in group:
            target = targets[turn.target]
            boxes = [((part.row, part.col), (part.rows, part.width)) for part in parts]
            if fault := partition_fault((turn.rows, turn.columns), boxes):
                tally.faults.append(f"{target.label}: a matrix of {tensor}: {fault}")
                return []
            _check_dtype(target, source)
            for part in parts:
                tally.used[part.span.fragment] = tally.used.get(part.span.fragment, 0) + part.rows * part.width
            tally.written[turn.target] = tally.written.get(turn.target, 0) + turn.rows * turn.columns
        reads = [part for _, parts in group for part in parts]
        if len(group) > 1:
            reads = [replace(reads[0], source_col=reads[0].span.col, width=reads[0].span.width)]
        cut = tuple(_read(p.span, p.source_row, p.rows, p.source_col, p.width, sources[p.span.fragment]) for p in reads)
        slabs.append(Slab(cut, (), source.dtype, tuple(turn for turn, _ in group)))
    return slabs


def _chop(
    low: int, high: int, needed: list[Span], takers: list[Span], sources, targets, tally: _Tally, block: int
) -> list[Slab]:
    """Rows [low, high) as slabs of at most `block` bytes read, and the elements counted."""
    size = sources[needed[0].fragment].itemsize
    rows_each = max(1, block // (sum(span.width for span in needed) * size))
    count = high - low
    for span in needed:
        tally.used[span.fragment] = tally.used.get(span.fragment, 0) + count * taken(span, takers)
    for span in takers:
        tally.written[span.fragment] = tally.written.get(span.fragment, 0) + count * span.width
    return [
        _slab(at, min(rows_each, high - at), needed, takers, sources, targets) for at in range(low, high, rows_each)
    ]


def _slab(row: int, rows: int, needed: list[Span], takers: list[Span], sources, targets) -> Slab:
    source = sources[needed[0].fragment]
    size, held = source.itemsize, [wanted_columns(span, takers) for span in needed]
    reads = tuple(
        _read(span, row, rows, col, width, sources[span.fragment])
        for span, (col, width) in zip(needed, held, strict=True)
    )
    writes = []
    for taker in takers:
        target = targets[taker.fragment]
        _check_dtype(target, source)
        element = (taker.local_row + row - taker.row) * taker.local_width + taker.local_col
        parts = []
        for number, (col, width) in enumerate(held):
            first, last = max(col, taker.col), min(col + width, taker.col + taker.width)
            if first < last:
                parts.append((number, (first - col) * size, (first - taker.col) * size, (last - first) * size))
        writes.append(
            Write(
                taker.fragment,
                element * target.itemsize,
                rows,
                taker.local_width * target.itemsize,
                taker.width * target.itemsize,
                tuple(parts),
            )
        )
    return Slab(reads, tuple(writes), source.dtype)


def _read(span: Span, row: int, rows: int, col: int, width: int, source: Fragment) -> Read:
    """Rows [row, row+rows) x columns [col, col+width) of a source."""
    at = (span.local_row + row - span.row) * span.local_width + span.local_col + col - span.col
    size = source.itemsize
    return Read(span.fragment, source.offset + at * size, rows, span.local_width * size, width * size)


def _check_dtype(target: Fragment, source: Fragment) -> None:
    if target.dtype != source.dtype and not target.cast:
        raise UserError(
            f"{target.label} is {target.dtype}, its source {source.label} is {source.dtype}; a converter never casts."
        )


def _first(faults: list[str], most: int = 8) -> list[str]:
    return faults[:most] + ([f"and {len(faults) - most} more"] if len(faults) > most else [])
