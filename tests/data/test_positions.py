"""M-RoPE positions of every decoder against its own family's `get_rope_index`."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from mm_models.registry import table
from tests.models import tiny_model

DECODERS = {
    "glm4v_moe_lm": "glm4v_moe",
    "glm4v_lm": "glm4v",
    "qwen2lm": "qwen2_vl",
    "qwen2_5_lm": "qwen2_5_vl",
}
IMAGE, START, END = 300, 302, 303
GRIDS = [(1, 4, 4), (1, 2, 8), (1, 6, 4)]


@pytest.fixture(scope="module")
def references():
    """`get_rope_index` of a decoder's family."""

    @cache
    def of(decoder):
        return tiny_model(DECODERS[decoder]).model.get_rope_index

    return of


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


def check(reference, decoder, samples, grids, side):
    ids, mask = batch(samples, side)
    grid = torch.tensor(grids) if grids else None
    expected, _ = reference(ids, (ids == IMAGE).int(), image_grid_thw=grid, attention_mask=mask)
    found = table("positions").get(decoder)(ids, mask, grid, image_token_id=IMAGE, spatial_merge_size=2)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_equal_to_hugging_face(references, decoder, case, side):
    check(references(decoder), decoder, *CASES[case], side)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 300), marks=pytest.mark.slow)])
@pytest.mark.parametrize("decoder", DECODERS)
def test_random_batches(references, decoder, seeds):
    """One to four rows of text and up to three images of any shape, padded on either side."""
    for seed in seeds:
        draw = random.Random(seed)
        samples, grids = [], []
        for _ in range(draw.randint(1, 4)):
            images = [(1, 2 * draw.randint(1, 6), 2 * draw.randint(1, 6)) for _ in range(draw.randint(0, 3))]
            texts = [draw.randint(0, 5) for _ in images]
            samples.append(sample(*[part for pair in zip(texts, images) for part in pair], draw.randint(1, 9)))
            grids += images
        check(references(decoder), decoder, samples, grids, draw.choice(["left", "right"]))


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
