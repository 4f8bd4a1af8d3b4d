"""Processors of Qwen2-VL, Qwen2.5-VL and GLM-4.1V: the stock classes, both layouts, bounds in pixels of one image.

What does not depend on the family is tested with GLM-4.5V's in `test_processor`.
"""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from mm_models.data.processor import KINDS, image_grid, load_processor, pixel_bounds
from tests.data import kit
from tests.data.test_processor import same

CLASSES = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "glm4v": "Glm4vProcessor"}
HUB = {
    "min_pixels": 784,
    "max_pixels": 12544,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}
"""`preprocessor_config.json` as Qwen's folders have it."""


def hub_layout(folder, target, family, **changes):
    """A folder as it was published: min_pixels and max_pixels, the template in chat_template.json."""
    shutil.copytree(folder, target)
    template = (target / "chat_template.jinja").read_text()
    for name in ("processor_config.json", "chat_template.jinja"):
        (target / name).unlink()
    config = HUB | {"processor_class": CLASSES[family]} | changes
    (target / "preprocessor_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (target / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return target


@pytest.mark.parametrize("family", CLASSES)
def test_it_is_the_stock_class(folders, family):
    import transformers

    processor = load_processor(folders(family))
    assert isinstance(processor, getattr(transformers, CLASSES[family]))
    assert type(processor).__name__ == CLASSES[family]
    tokens = processor.tokenizer.get_added_vocab()
    assert processor.image_token_id == tokens[processor.image_token]
    assert processor.video_token_id == tokens[processor.video_token] != processor.image_token_id


@pytest.mark.parametrize("family", CLASSES)
def test_save_and_load_round_trip(folders, tmp_path, family):
    processor = load_processor(folders(family), image_min_pixels=1568, image_max_pixels=6272)
    processor.save_pretrained(tmp_path / "saved")
    again = load_processor(tmp_path / "saved")
    assert same(again, processor) and pixel_bounds(again) == (1568, 6272)
    assert json.loads((tmp_path / "saved/processor_config.json").read_text())["processor_class"] == CLASSES[family]


class TestHubLayout:
    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
    def test_it_gives_the_same(self, folders, tmp_path, family):
        old = load_processor(hub_layout(folders(family), tmp_path / "old", family))
        assert same(old, load_processor(folders(family))) and pixel_bounds(old) == (784, 12544)

    def test_bounds_given_replace_its_own_and_are_saved(self, folders, tmp_path):
        """B49: `min_pixels` of the folder does not come back."""
        old = hub_layout(folders("qwen2_vl"), tmp_path / "old", "qwen2_vl")
        processor = load_processor(old, image_min_pixels=1568, image_max_pixels=3136)
        made = processor.image_processor(images=[kit.pattern(560, 560)], return_tensors="pt")["image_grid_thw"]
        assert made.tolist() == [[1, 4, 4]]
        processor.save_pretrained(tmp_path / "saved")
        assert pixel_bounds(load_processor(tmp_path / "saved")) == (1568, 3136)

    @pytest.mark.parametrize(
        "size", [{"min_pixels": 1568, "max_pixels": 6272}, {"shortest_edge": 1568, "longest_edge": 6272}]
    )
    def test_bounds_under_size(self, folders, tmp_path, size):
        bounds = {"min_pixels": None, "max_pixels": None, "size": size}
        old = load_processor(hub_layout(folders("qwen2_vl"), tmp_path / "old", "qwen2_vl", **bounds))
        assert pixel_bounds(old) == (1568, 6272)
        assert image_grid(old, 560, 560) == (1, 4, 4)


@pytest.mark.parametrize("family", CLASSES)
class TestBounds:
    """B49, in pixels of one resized image: the same arguments, the same pixels in every family."""

    def test_most(self, folders, family):
        assert image_grid(load_processor(folders(family), image_max_pixels=112 * 112), 560, 560) == (1, 8, 8)

    def test_least(self, folders, family):
        processor = load_processor(folders(family), image_min_pixels=224 * 224, image_max_pixels=448 * 448)
        assert image_grid(processor, 56, 56) == (1, 16, 16)

    def test_none(self, folders, family):
        """The field's data.json has a minimum of 0."""
        processor = load_processor(folders(family), image_min_pixels=0)
        assert image_grid(processor, 28, 28) == (1, 2, 2)


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CLASSES)
def test_the_grid_from_the_size_is_that_of_the_pixels(folders, family, count):
    """Any shape the processor takes, thin ones and ones below a patch too."""
    processor, draw = load_processor(folders(family)), random.Random(7)
    for _ in range(count):
        height, width = (round(2 ** draw.uniform(1, 8)) for _ in range(2))
        image = kit.pattern(width, height, draw.randint(0, 99))
        made = processor.image_processor(images=[image], return_tensors="pt")
        grid = image_grid(processor, height, width)
        assert tuple(made["image_grid_thw"][0].tolist()) == grid
        assert made["pixel_values"].shape == (grid[1] * grid[2], 1176) and made["pixel_values"].dtype == torch.float32


def test_every_kind_is_tested():
    assert set(CLASSES.values()) == set(KINDS)
