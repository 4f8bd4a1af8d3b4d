"""Boxes of Hugging Face tensors as fragments: how a tensor is cut into DCP items, and where a box of one belongs.

A box is given in the tensor's own shape, whatever its expert layout; a fragment speaks of the view its placements have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mm_models.weights.boxes import Box, Placement, Shape, volume
from mm_models.weights.dtypes import itemsize
from mm_models.weights.model_map import HfTensor
from mm_models.weights.plan import Fragment
from mm_models.weights.spans import swapped
from mm_models.weights.stores import moment_tensor

CHUNK = 64 << 20
"""Bytes of a DCP item at most, one row of dimension 0 excepted."""


def cut(shape: Shape, row_bytes: int, period: int = 1) -> Iterator[tuple[int, int]]:
    """Dimension 0 of `shape` as (first, rows) of at most `CHUNK` bytes each: whole periods of rows, or parts of one period."""
    if not shape:
        yield 0, 1
        return
    rows = max(1, CHUNK // max(1, row_bytes))
    block = rows - rows % period if rows >= period else period
    for start in range(0, shape[0], block):
        for first in range(start, min(start + block, shape[0]), rows):
            yield first, min(rows, start + block - first, shape[0] - first)


def item_boxes(tensor: HfTensor, dtype: str) -> Iterator[Box]:
    """The boxes a whole tensor is written in; those of `flat` experts end where an expert ends."""
    row_bytes = volume(tensor.shape[1:]) * itemsize(dtype)
    flat = tensor.transposed and len(tensor.shape) == 2
    for first, rows in cut(tensor.shape, row_bytes, tensor.view[-1] if flat else 1):
        yield (first, *(0,) * (len(tensor.shape) - 1)), (rows, *tensor.shape[1:])


def box_fragments(
    tensor: HfTensor,
    box: Box,
    *,
    label: str,
    dtype: str,
    file: Path | None = None,
    memory: memoryview | None = None,
    offset: int = 0,
    crc: int | None = None,
    cast: bool = False,
) -> list[Fragment]:
    """The box as stored at `offset`, contiguous: one fragment, or several where a `flat` box cuts experts."""
    found = []
    views = list(_views(tensor, box))
    for view, elements in views:
        placements = []
        for placement in tensor.placements:
            if clipped := placement.clip_local(view):
                local = tuple(at - first for at, first in zip(clipped.local, view[0]))
                placements.append(Placement(clipped.tensor, clipped.start, local, clipped.extent))
        found.append(
            Fragment(
                label=label,
                dtype=dtype,
                shape=view[1],
                placements=tuple(placements),
                file=file,
                memory=memory,
                offset=offset + elements * itemsize(dtype),
                crc=crc if len(views) == 1 else None,
                cast=cast,
                transposed=tensor.transposed,
            )
        )
    return found


def moment_of(tensor: HfTensor, part: str) -> HfTensor:
    """The tensor of one part of a parameter's optimizer state: it belongs where the parameter does, in the moment's name."""
    placements = tuple(replace(p, tensor=moment_tensor(p.tensor, part)) for p in tensor.placements)
    return replace(tensor, placements=placements)


def _views(tensor: HfTensor, box: Box) -> Iterator[tuple[Box, int]]:
    """(box of the view, elements of the stored box before it)."""
    start, sizes = box
    if not tensor.transposed:
        lead = (0,) * (len(tensor.view) - len(tensor.shape))
        yield ((*lead, *start), (*(1 for _ in lead), *sizes)), 0
    elif len(tensor.shape) == 3:
        yield (swapped(start), swapped(sizes)), 0
    else:
        inner = tensor.view[-1]
        row, end = start[0], start[0] + sizes[0]
        while row < end:
            expert, at = divmod(row, inner)
            if at == 0 and end - row >= inner:
                experts, rows = (end - row) // inner, inner
            else:
                experts, rows = 1, min(inner - at, end - row)
            yield ((expert, start[1], at), (experts, sizes[1], rows)), (row - start[0]) * sizes[1]
            row += experts * rows
