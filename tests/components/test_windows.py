"""Window order against Hugging Face's own function, over ragged grids; and what a tower does with it."""

from __future__ import annotations

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from mm_models.components.windows import reorder, windows

GRIDS = {
    "whole": [(1, 8, 8)],
    "ragged both ways": [(1, 12, 10)],
    "smaller than a window": [(1, 2, 4)],
    "one row": [(1, 2, 18)],
    "frames": [(3, 6, 4)],
    "several images": [(1, 4, 6), (2, 8, 4), (1, 2, 2), (1, 10, 14)],
}
SIDES = {"4 tokens": (112, 14, 2), "2 tokens": (56, 14, 2), "1 token": (28, 14, 2), "not a multiple": (100, 14, 2)}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("grid", GRIDS)
def test_order_and_lengths_are_hugging_faces(grid, sides):
    window, patch, merge = SIDES[sides]
    grid_thw = torch.tensor(GRIDS[grid])
    index, cumulative = get_vision_window_index(grid_thw, merge, window, patch)
    found = windows(grid_thw, merge=merge, window=window, patch=patch)
    assert torch.equal(found.index, index)
    assert found.lengths == torch.diff(cumulative).tolist()
    assert torch.equal(found.index[found.inverse], torch.arange(len(index)))


def test_patches_of_a_token_move_together_and_come_back():
    found = windows(torch.tensor([(1, 4, 6)]), merge=2, window=56, patch=14)
    assert found.index.tolist() == [0, 1, 3, 4, 2, 5] and found.lengths == [16, 8]
    x = torch.randn(24, 5)
    moved = reorder(x, found.index, 4)
    assert torch.equal(moved[8:12], x[12:16]) and torch.equal(moved[16:20], x[8:12])
    assert torch.equal(reorder(moved, found.inverse, 4), x)
