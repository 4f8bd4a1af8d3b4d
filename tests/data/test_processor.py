"""The processor of a folder, without torchvision: both layouts, the same ids and pixels, bounds that act (B33, B49)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from mm_models.data.processor import image_grid, load_processor, pixel_bounds
from mm_models.errors import UserError
from tests.data import kit

TURNS = kit.turns("<image>what?", "that", "and <image>", "this")
IMAGES = [kit.pattern(90, 150, 1), kit.pattern(300, 60, 2)]


def prompt(processor):
    return processor.apply_chat_template(
        kit.messages(TURNS, IMAGES), tokenize=True, return_dict=True, return_tensors="pt"
    )


def same(left, right):
    left, right = prompt(left), prompt(right)
    assert (
        left.keys()
        == right.keys()
        == {"input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"}
    )
    return all(torch.equal(left[key], right[key]) for key in left)


def old_layout(folder, target, template_in):
    """The layout of transformers 4: preprocessor_config.json, the template elsewhere."""
    shutil.copytree(folder, target)
    config = json.loads((target / "processor_config.json").read_text())
    (target / "processor_config.json").unlink()
    images = config["image_processor"] | {"processor_class": "Glm4vProcessor"}
    (target / "preprocessor_config.json").write_text(json.dumps(images))
    text = (target / "chat_template.jinja").read_text()
    if template_in != "chat_template.jinja":
        (target / "chat_template.jinja").unlink()
        path = target / template_in
        value = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(value | {"chat_template": text}))
    return target


def test_it_is_the_stock_class_without_torchvision(processor):
    from transformers import Glm4vProcessor

    assert isinstance(processor, Glm4vProcessor)
    assert type(processor).__name__ == "Glm4vProcessor"
    assert type(processor.image_processor).__name__ == "Glm4vImageProcessorPil"


@pytest.mark.parametrize("template_in", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_the_old_layout_gives_the_same(processor, folder, tmp_path, template_in):
    assert same(load_processor(old_layout(folder, tmp_path / "old", template_in)), processor)


def test_save_and_load_round_trip(processor, folder, tmp_path):
    """Twice, and from a folder that stands alone: nothing refers back to where it came from."""
    processor.save_pretrained(tmp_path / "one")
    load_processor(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert same(load_processor(tmp_path / "two"), processor)
    for name in ("processor_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert str(tmp_path) not in (tmp_path / "two" / name).read_text()
    assert json.loads((tmp_path / "two" / "processor_config.json").read_text())["processor_class"] == "Glm4vProcessor"


def test_it_loads_in_a_process_without_network(folder):
    code = f"from mm_models.data.processor import load_processor; print(load_processor({str(folder)!r}).image_token_id)"
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "510"


class TestBounds:
    """B49, in pixels of one resized image."""

    def grid(self, processor, image):
        made = processor.image_processor(images=[image], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert tuple(made) == image_grid(processor, image.height, image.width)
        return made

    def test_max_pixels(self, folder):
        assert self.grid(load_processor(folder, image_max_pixels=112 * 112), kit.pattern(560, 560)) == [1, 8, 8]

    def test_min_pixels(self, folder):
        bounds = {"image_min_pixels": 224 * 224, "image_max_pixels": 448 * 448}
        assert self.grid(load_processor(folder, **bounds), kit.pattern(56, 56)) == [1, 16, 16]

    def test_the_folder_s_own_bounds_stay_when_none_are_given(self, processor):
        assert pixel_bounds(processor) == (784, 12544)

    def test_the_bounds_used_are_saved(self, folder, tmp_path):
        load_processor(folder, image_min_pixels=3136, image_max_pixels=6272).save_pretrained(tmp_path / "saved")
        assert pixel_bounds(load_processor(tmp_path / "saved")) == (3136, 6272)

    def test_a_minimum_above_the_folder_s_maximum(self, folder):
        with pytest.raises(UserError, match="image_min_pixels 50176 exceeds image_max_pixels 12544"):
            load_processor(folder, image_min_pixels=224 * 224)


class TestRefused:
    def test_no_folder(self, tmp_path):
        with pytest.raises(UserError, match="no such folder"):
            load_processor(tmp_path / "absent")

    def test_no_processor(self, tmp_path):
        with pytest.raises(UserError, match="names a processor_class"):
            load_processor(tmp_path)

    def test_an_unknown_class(self, folder, tmp_path):
        shutil.copytree(folder, tmp_path / "other")
        path = tmp_path / "other" / "processor_config.json"
        path.write_text(path.read_text().replace("Glm4vProcessor", "Glm4Processor"))
        with pytest.raises(UserError, match=r"unknown processor_class 'Glm4Processor'.*did you mean 'Glm4vProcessor'"):
            load_processor(tmp_path / "other")

    @pytest.mark.parametrize(
        ("name", "message"), [("tokenizer", "no tokenizer.json"), ("chat_template", "no chat template")]
    )
    def test_a_part_is_missing(self, folder, tmp_path, name, message):
        shutil.copytree(folder, tmp_path / "other")
        for path in (tmp_path / "other").glob(f"{name}*"):
            path.unlink()
        with pytest.raises(UserError, match=message):
            load_processor(tmp_path / "other")
