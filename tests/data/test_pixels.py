"""Pixels are the processor's own, bit by bit, whatever its settings and the shape of the picture."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_models.data.pixels import PixelMaker
from mm_models.errors import UserError
from tests.data import kit

FAMILIES = ("glm4v_moe", "glm4v", "qwen2_vl", "qwen2_5_vl")


def check(maker, processor, image):
    _, rows, columns = grid = maker.grid(image)
    out = torch.full((rows * columns, maker.features), torch.nan)
    maker.fill(out, image, grid)
    expected = processor.image_processor(images=[image], return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [[1, rows, columns]]
    assert torch.equal(out, expected["pixel_values"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape(processors, family):
    processor = processors(family, image_min_pixels=3136, image_max_pixels=50176)
    maker = PixelMaker(processor)

    @settings(max_examples=60, deadline=None)
    @given(width=st.integers(1, 700), height=st.integers(1, 700), seed=st.integers(0, 9))
    def run(width, height, seed):
        if max(width, height) <= 200 * min(width, height):
            check(maker, processor, kit.pattern(width, height, seed))

    run()


@pytest.mark.parametrize(
    "changes",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 0.01},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.9, 0.5, 0.7]},
        {"resample": 0},
        {"resample": 2},
        {"patch_size": 16},
        {"merge_size": 1},
        {"merge_size": 3},
        {"temporal_patch_size": 1},
        {"temporal_patch_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ("glm4v", "qwen2_vl"))
def test_every_setting(processors, family, changes):
    processor = _changed(processors(family), changes)
    maker = PixelMaker(processor)
    for seed, size in enumerate([(112, 112), (60, 300), (301, 97)]):
        check(maker, processor, kit.pattern(*size, seed))


def test_a_processor_that_does_more_than_its_settings_say(processors, monkeypatch):
    processor = _changed(processors("qwen2_vl"), {})
    stock = processor.image_processor.patchify
    monkeypatch.setattr(
        processor.image_processor, "patchify", lambda image, *rest, **more: stock(-image, *rest, **more)
    )
    with pytest.raises(UserError, match="makes other pixels of a test picture"):
        PixelMaker(processor)


def test_a_folder_that_does_not_resize(processors):
    with pytest.raises(UserError, match="do_resize false"):
        PixelMaker(_changed(processors("glm4v"), {"do_resize": False}))


def _changed(processor, changes):
    processor = copy.copy(processor)
    processor.image_processor = copy.deepcopy(processor.image_processor)
    for name, value in changes.items():
        setattr(processor.image_processor, name, value)
    return processor
