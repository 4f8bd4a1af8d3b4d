"""M-RoPE positions of glm4v_moe_lm against Hugging Face's own `get_rope_index`."""

from __future__ import annotations

import pytest
import torch

from mm_models.registry import table
from tests.models import tiny_glm_model

IMAGE, START, END = 300, 302, 303
GRIDS = [(1, 4, 4), (1, 2, 8), (1, 6, 4)]


@pytest.fixture(scope="module")
def reference():
    return tiny_glm_model().model.get_rope_index


@pytest.fixture(scope="module")
def positions():
    return table("positions").get("glm4v_moe_lm")


def sample(*parts):
    """Ids of text lengths (int) and image grids (tuple)."""
    ids = []
    for part in parts:
        ids += range(10, 10 + part) if isinstance(part, int) else [START, *[IMAGE] * (part[1] * part[2] // 4), END]
    return ids


def batch(samples, side):
    length = max(map(len, samples))
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, found in enumerate(samples):
        where = slice(0, len(found)) if side == "right" else slice(length - len(found), length)
        ids[row, where], mask[row, where] = torch.tensor(found), 1
    return ids, mask


CASES = {
    "text": ([sample(7), sample(3)], []),
    "one image": ([sample(2, GRIDS[0], 3)], GRIDS[:1]),
    "image first and last": ([sample(GRIDS[1], 1), sample(4, GRIDS[2])], GRIDS[1:]),
    "three images": ([sample(1, *GRIDS, 2)], GRIDS),
    "mixed": ([sample(3), sample(1, GRIDS[0], 2, GRIDS[1], 1), sample(9, GRIDS[2], 9)], GRIDS),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_hugging_face(reference, positions, case, side):
    samples, grids = CASES[case]
    ids, mask = batch(samples, side)
    grid = torch.tensor(grids) if grids else None
    expected, _ = reference(ids, (ids == IMAGE).int(), image_grid_thw=grid, attention_mask=mask)
    found = positions(ids, mask, grid, image_token_id=IMAGE, spatial_merge_size=2)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([(1, 4, 6)], "batch row 0, image 0: 4 image tokens, grid \\(1, 4, 6\\) needs 6"),
        ([], "batch row 0: image 0 has tokens but no grid; the batch brings 0"),
        ([(1, 4, 4), (1, 4, 4)], "the batch brings 2 image grids but only 1 images have tokens"),
    ],
)
def test_counts_that_disagree(positions, grids, message):
    ids, mask = batch([sample(2, GRIDS[0])], "right")
    grid = torch.tensor(grids) if grids else None
    with pytest.raises(ValueError, match=message):
        positions(ids, mask, grid, image_token_id=IMAGE, spatial_merge_size=2)
