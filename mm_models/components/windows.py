"""Window attention of a vision tower: the order of merged tokens that makes every window contiguous.

Per image and frame the grid of merged tokens is tiled by squares of `window // merge // patch` tokens a side, row by row, ragged at
the right and bottom edges. The tokens are sorted by their square, and the merge² patches of a token move together, so that both
windows and whole frames are contiguous segments of one order. The projector's output goes back by `inverse`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Windows:
    """`index` (merged tokens,) int64: the token at each place; `inverse` undoes it; `lengths`: patches in each window, in that order."""

    index: torch.Tensor
    inverse: torch.Tensor
    lengths: list[int]


def windows(grid_thw: torch.Tensor, *, merge: int, window: int, patch: int) -> Windows:
    """The windows of images (N, 3) of (t, h, w) patches. `window` and `patch` are sides in pixels; a window holds a token at least."""
    side = window // merge // patch
    order, lengths, start = [], [], 0
    for t, h, w in grid_thw.tolist():
        height, width = h // merge, w // merge
        down, across = (-(-size // side) for size in (height, width))
        frame, row, column = torch.meshgrid(torch.arange(t), torch.arange(height), torch.arange(width), indexing="ij")
        square = ((frame * down + row // side) * across + column // side).flatten()
        order.append(torch.argsort(square, stable=True) + start)
        lengths += (torch.bincount(square) * merge**2).tolist()
        start += len(square)
    index = torch.cat(order).to(grid_thw.device)
    return Windows(index=index, inverse=torch.argsort(index), lengths=lengths)


def reorder(x: torch.Tensor, index: torch.Tensor, unit: int) -> torch.Tensor:
    """(tokens * unit, ...) with its groups of `unit` rows in the order of `index` (tokens,)."""
    return x.unflatten(0, (-1, unit))[index].flatten(0, 1)
