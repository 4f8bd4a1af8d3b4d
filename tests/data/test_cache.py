"""The cache of examined samples: what changes it, who builds it, what is left of a broken one (field case B43)."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from PIL import Image

from mm_models.data import cache
from mm_models.data.dataset import ChatDataset
from mm_models.data.examine import make_processor, make_template
from mm_models.data.loader import build_loader
from mm_models.errors import UserError
from mm_models.registry import load_plugins
from tests import harness
from tests.data import kit


@pytest.fixture
def world(folder, tmp_path):
    """A processor folder of its own and four rows with pictures; `open` opens them with a cache, or without."""
    return World(shutil.copytree(folder, tmp_path / "hf"), tmp_path)


class World:
    def __init__(self, hf, base):
        self.hf, self.base, self.folder = hf, base, base / "cache"
        names = [kit.picture(base / f"{index}.bmp", 84, 56, index).name for index in range(4)]
        self.rows = [
            kit.row("<image>what?", f"answer {k}", "more?", "no", images=[name]) for k, name in enumerate(names)
        ]
        self.write(self.rows)

    def write(self, rows):
        kit.data_config(self.hf, self.base, rows)

    def config(self, cached=True, **changes):
        return kit.data_config(self.hf, self.base, cache_dir=str(self.folder) if cached else None, **changes)

    def open(self, cached=True, **changes):
        return open_config(self.config(cached, **changes))

    def same_as_without(self, **changes):
        """Whether the samples and the report are those of a run with an empty cache."""
        cached, fresh = self.open(**changes), self.open(cached=False, **changes)
        assert list(cached) == list(fresh) and cached.report.counts == fresh.report.counts
        return cached

    def batch(self, cached=True, **changes):
        """The first batch of a run: all four rows, in their order."""
        config = self.config(cached, sampler_type="SequentialBatchSampler", shuffle=False, **changes)
        model = kit.model_config(make_processor(config))
        return next(iter(build_loader(config, model_config=model, micro_batch_size=4, global_batch_size=4)))

    def follows(self, change):
        """Whether the first batch of a run after `change`, which returns what to change in data.json, is that of a run
        with an empty cache, and another than before."""
        before = self.batch()
        assert equal(self.batch(), before) and len(self.builds()) == 1
        changes = change(self)
        found = self.batch(**changes)
        assert equal(found, self.batch(cached=False, **changes)) and not equal(found, before)

    def builds(self):
        """The build of each key, by the key."""
        metas = (path for path in self.folder.glob("*.json"))
        return {path.stem: json.loads(path.read_text())["id"] for path in metas}


def equal(one, other):
    """Whether two batches are the same, bit by bit."""
    tensors = [key for key in one if key != "sample_ids"]
    return (
        one.keys() == other.keys()
        and one["sample_ids"] == other["sample_ids"]
        and all(torch.equal(one[key], other[key]) for key in tensors)
    )


def open_config(config):
    processor = make_processor(config)
    return ChatDataset(config, processor, make_template(config, processor))


def test_no_change_is_a_hit(world, monkeypatch):
    first = list(world.open())
    before = world.builds()
    monkeypatch.setattr("mm_models.data.dataset.preprocess", None)
    found = world.open(preprocessing_batch_size=2, preprocessing_num_workers=3, dataset_weights=[2.0])
    assert list(found) == first and world.builds() == before and len(before) == 1


def test_a_cache_that_is_used_is_named(world):
    def remarks():
        return [line for line in world.open().report.lines() if "examined before" in line]

    assert remarks() == []
    (line,) = remarks()
    (samples,) = world.folder.glob("*.samples.arrow")
    assert line == f"data was examined before: {samples}"


OPTIONS = {
    "cutoff_len": 35,
    "image_max_pixels": 800,
    "mask_history": True,
    "train_on_prompt": True,
    "enable_thinking": False,
    "template": "glm4v",
    "max_samples": 2,
    "val_rate": 0.5,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_shapes_samples_changes_the_key(world, option):
    config = world.config()
    changed = world.config(**{option: OPTIONS[option]})
    paths = [world.base / "train.json"]
    key = cache.key(config, paths, split="train")
    assert key == cache.key(world.config(), paths, split="train") != cache.key(changed, paths, split="train")
    assert key != cache.key(config, paths, split="valid")


def _one_line(world):
    world.rows[2]["messages"][1]["content"] = "answer 7"
    world.write(world.rows)
    return {}


def _tokenizer(world):
    path = world.hf / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer))
    return {}


def _image(world):
    """The same path, size and sides; a picture of its own."""
    size = (world.base / "1.bmp").stat().st_size
    assert kit.picture(world.base / "1.bmp", 84, 56, 9).stat().st_size == size
    return {}


CHANGES = {
    **{option: lambda _, option=option: {option: OPTIONS[option]} for option in ("cutoff_len", "mask_history")},
    "train_on_prompt": lambda _: {"train_on_prompt": True},
    "image_max_pixels": lambda _: {"image_max_pixels": 800},
    "a line": _one_line,
    "the tokenizer in place": _tokenizer,
    "the bytes of an image": _image,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_batch_follows_every_change(world, change):
    world.follows(CHANGES[change])


RULE = """
from mm_models.data.templates.glm4v_moe import Glm4vMoeTemplate

class Rule(Glm4vMoeTemplate):
    def answer(self, text, *, last, trained):
        return super().answer(text, last=last, trained=trained and {trained})
"""
BRIEF = """
from mm_models.registry import table
from .rule import Rule

class Brief(Rule):
    pass

table("templates").add("brief", "brief:Brief")
"""
"""A template that the folder accepts as its own: what it writes is the same, what is trained is not."""


def _another_template(rank, world, plugin):
    load_plugins([str(plugin)])
    world.follows(lambda _: {"template": "brief"})


def _brief(rank, world, plugin):
    load_plugins([str(plugin)])
    return world.batch(template="brief"), world.batch(cached=False, template="brief")


def test_the_first_batch_follows_the_template(world):
    """Another template; and the same one with a class below it edited between two runs."""
    plugin = world.base / "brief"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(BRIEF)
    (plugin / "rule.py").write_text(RULE.format(trained="last"))
    harness.run(_another_template, 1, world, plugin)
    ((before, _),) = harness.run(_brief, 1, world, plugin)
    (plugin / "rule.py").write_text(RULE.format(trained="not last"))
    ((found, fresh),) = harness.run(_brief, 1, world, plugin)
    assert equal(found, fresh) and not equal(found, before)


def test_samples_follow_one_line_of_the_data(world):
    before = list(world.open())
    _one_line(world)
    assert [sample.id for sample, old in zip(world.same_as_without(), before, strict=True) if sample != old] == [2]


def test_samples_follow_the_bytes_of_an_image(world, capfd):
    """The same path and the same size: 84 x 56 becomes 56 x 84 in a BMP of as many bytes."""
    before, path = list(world.open()), world.base / "0.bmp"
    size = path.stat().st_size
    Image.new("RGB", (56, 84)).save(path)
    assert path.stat().st_size == size
    found = world.same_as_without()
    assert (before[0].grids, found[0].grids) == (((1, 4, 6),), ((1, 6, 4),)) and found[1] == before[1]
    assert f"image '{path}' has changed; built anew" in capfd.readouterr().out
    path.unlink()
    with pytest.raises(UserError, match=r"row 0: image .*0.bmp': no such file"):
        world.open()


def test_an_image_whose_size_and_time_are_kept(world):
    """No cache can see it; its pixels are read anew, and other sides are refused when it is drawn."""
    path, before = world.base / "1.bmp", world.batch()
    found = path.stat()

    def replace(width, height):
        kit.picture(path, width, height, 9)
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)

    replace(84, 56)
    now = world.batch()
    assert len(set(world.builds().values())) == 1
    assert equal(now, world.batch(cached=False)) and not equal(now, before)
    replace(56, 84)
    with pytest.raises(UserError, match=r"row 1, image .*1\.bmp"):
        world.batch()


def test_a_dropped_image_that_comes_back(world):
    """An image looked at counts, whether its row was kept or not."""
    picture = (world.base / "1.bmp").read_bytes()
    (world.base / "1.bmp").unlink()
    assert [sample.id for sample in world.open(on_broken_image="drop")] == [0, 2, 3]
    (world.base / "1.bmp").write_bytes(picture)
    assert [sample.id for sample in world.same_as_without(on_broken_image="drop")] == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["cut", "emptied", "gone", "meta", "foreign"])
def test_a_broken_cache_is_built_anew_and_said_once(world, capfd, damage):
    first = list(world.open())
    samples = next(world.folder.glob("*.samples.arrow"))
    meta = next(world.folder.glob("*.json"))
    if damage == "cut":
        os.truncate(samples, samples.stat().st_size // 2)
    elif damage == "emptied":
        os.truncate(samples, 0)
    elif damage == "gone":
        samples.unlink()
    elif damage == "meta":
        os.truncate(meta, 20)
    else:
        meta.write_text('{"layout": 0}')
    assert list(world.open()) == first == list(world.open())
    assert capfd.readouterr().out.count("built anew") == 1


def test_overwrite_builds_anew_and_removes_the_build_before_last(world):
    ids = []
    for _ in range(3):
        world.open(overwrite_cache=True)
        ids += world.builds().values()
    left = {path.name.split("-")[1].split(".")[0] for path in world.folder.glob("*.samples.arrow")}
    assert len(set(ids)) == 3 and left == set(ids[1:])


def test_rows_that_are_refused_leave_nothing(world):
    world.write([*world.rows, {"messages": []}])
    with pytest.raises(UserError, match="row 4"):
        world.open()
    assert [path.suffix for path in world.folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made(world):
    world.folder.write_text("a file")
    with pytest.raises(UserError, match=r"cache_dir .*cannot be made"):
        world.open()


def _together(rank, config, overwrite):
    return [list(open_config(config)), cache.load.__module__]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.slow
def test_ranks_that_start_together_build_once(world, overwrite):
    config = world.config(overwrite_cache=overwrite)
    expected = list(world.open(cached=False))
    for samples, _ in harness.run(_together, 2, config, overwrite, timeout=100):
        assert samples == expected
    if not overwrite:
        assert len(list(world.folder.glob("*.samples.arrow"))) == 1
