"""Index algebra on boxes: the whole of the weight map rests on these few functions.

A box is `(start, extent)`, one number per dimension. A `Placement` is a translation between two boxes of equal extent:
a box of a *global tensor* (the whole, unsharded Megatron tensor) lies at `local` inside some *stored tensor* (a Hugging
Face tensor, one rank's shard, a range of an optimizer moment). Everything that moves weights is the intersection of the
placements of its sources with the placements of its targets, in the coordinates of the global tensor they share.

Nothing here knows torch, files or models. Broken invariants are assertions; what depends on input is returned as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""(start, extent)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The box `start`/`extent` of global tensor `tensor` lies at `local` in a stored tensor, element for element."""

    tensor: str
    start: Shape
    local: Shape
    extent: Shape

    @property
    def local_box(self) -> Box:
        return self.local, self.extent

    @property
    def global_box(self) -> Box:
        return self.start, self.extent

    def clip_local(self, box: Box) -> Placement | None:
        """The part of this placement that lies in `box` of the stored tensor; None if there is none."""
        common = intersect(self.local_box, box)
        if common is None:
            return None
        start = tuple(g + c - at for g, c, at in zip(self.start, common[0], self.local))
        return Placement(self.tensor, start, common[0], common[1])


def whole(tensor: str, shape: Shape) -> Placement:
    """The placement of a stored tensor that is the global tensor."""
    zeros = (0,) * len(shape)
    return Placement(tensor, zeros, zeros, shape)


def volume(extent: Sequence[int]) -> int:
    return math.prod(extent)


def intersect(a: Box, b: Box) -> Box | None:
    """The common box, or None when it is empty."""
    start, extent = [], []
    for a0, an, b0, bn in zip(a[0], a[1], b[0], b[1], strict=True):
        low, high = max(a0, b0), min(a0 + an, b0 + bn)
        if low >= high:
            return None
        start.append(low)
        extent.append(high - low)
    return tuple(start), tuple(extent)


def partition_fault(shape: Shape, boxes: Iterable[Box]) -> str | None:
    """Prove that `boxes` cover every element of `shape` exactly once; None, or what is wrong.

    Inside, pairwise disjoint, volumes sum to the whole: together these are exact coverage.
    """
    boxes = sorted(boxes)
    if not shape:  # a number: one box without dimensions
        return None if len(boxes) == 1 else f"it is there {len(boxes)} times"
    total = 0
    active: list[Box] = []  # boxes whose first dimension reaches the current one: only those can overlap it
    for box in boxes:
        start, extent = box
        if len(start) != len(shape) or any(s < 0 or n < 1 or s + n > m for s, n, m in zip(start, extent, shape)):
            return f"box {_show(box)} does not lie in shape {shape}"
        active = [other for other in active if other[0][0] + other[1][0] > start[0]]
        for other in active:
            if intersect(box, other) is not None:
                return f"boxes {_show(other)} and {_show(box)} overlap"
        active.append(box)
        total += volume(extent)
    if total != volume(shape):
        return f"{total} of {volume(shape)} elements are covered (shape {shape})"
    return None


def flat_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The elements `[start, stop)` of a row-major tensor, as disjoint boxes in order: at most two per dimension and one more."""
    assert 0 <= start <= stop <= volume(shape), (shape, start, stop)
    if start == stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = volume(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        yield from _under(first, flat_range(shape[1:], start - first * inner, stop - first * inner))
        return
    zeros = (0,) * (len(shape) - 1)
    full_from, full_to = first, last + 1
    if start % inner:
        yield from _under(first, flat_range(shape[1:], start % inner, inner))
        full_from += 1
    if stop % inner:
        full_to -= 1
    if full_from < full_to:
        yield (full_from, *zeros), (full_to - full_from, *shape[1:])
    if stop % inner:
        yield from _under(last, flat_range(shape[1:], 0, stop % inner))


def row_runs(outer: Shape, local_outer: Shape, placement: Placement) -> Iterator[tuple[int, int, int]]:
    """A placement as runs of rows: `(global row, local row, rows)`, rows counted over all dimensions but the last.

    `outer` and `local_outer` are the leading dimensions of the global and of the stored tensor. Inside a run both row
    numbers advance by one: dimensions that both sides hold in full are merged.
    """
    starts, locals_, extents = placement.start[:-1], placement.local[:-1], placement.extent[:-1]
    split = len(outer) - 1
    while split > 0 and extents[split] == outer[split] == local_outer[split]:
        split -= 1
    if split < 0:  # no leading dimension at all
        yield 0, 0, 1
        return
    inner = volume(outer[split + 1 :])
    rows = extents[split] * inner
    for index in _indices(extents[:split]):
        at = [s + i for s, i in zip(starts, index)] + [starts[split]]
        local_at = [s + i for s, i in zip(locals_, index)] + [locals_[split]]
        yield _ravel(at, outer) * inner, _ravel(local_at, local_outer) * inner, rows


def _ravel(index: Sequence[int], shape: Shape) -> int:
    flat = 0
    for i, n in zip(index, shape):
        flat = flat * n + i
    return flat


def _indices(extents: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not extents:
        yield ()
        return
    for i in range(extents[0]):
        for rest in _indices(extents[1:]):
            yield (i, *rest)


def _under(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for start, extent in boxes:
        yield (index, *start), (1, *extent)


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{s}:{s + n}" for s, n in zip(*box)) + "]"
