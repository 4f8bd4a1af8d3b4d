"""The cache of examined samples: what changes it, who builds it, what is left of a broken one (field case B43)."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from PIL import Image

from mm_models.data import cache
from mm_models.data.dataset import ChatDataset
from mm_models.data.examine import make_processor, make_template
from mm_models.errors import UserError
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
        assert list(cached) == list(fresh) and cached.report == fresh.report
        return cached

    def builds(self):
        """The build of each key, by the key."""
        metas = (path for path in self.folder.glob("*.json"))
        return {path.stem: json.loads(path.read_text())["id"] for path in metas}


def open_config(config):
    processor = make_processor(config)
    return ChatDataset(config, processor, make_template(config, processor))


def test_no_change_is_a_hit(world, monkeypatch):
    first = list(world.open())
    before = world.builds()
    monkeypatch.setattr("mm_models.data.dataset.preprocess", None)
    found = world.open(preprocessing_batch_size=2, preprocessing_num_workers=3, dataset_weights=[2.0])
    assert list(found) == first and world.builds() == before and len(before) == 1


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
    """The template is proven equal to the processor's, so another one is told by its key alone."""
    config = world.config()
    changed = world.config(**{option: OPTIONS[option]})
    paths = [world.base / "train.json"]
    key = cache.key(config, paths, split="train")
    assert key == cache.key(world.config(), paths, split="train") != cache.key(changed, paths, split="train")
    assert key != cache.key(config, paths, split="valid")


@pytest.mark.parametrize("option", ["cutoff_len", "image_max_pixels", "mask_history"])
def test_samples_follow_an_option(world, option):
    before = list(world.open())
    found = world.same_as_without(**{option: OPTIONS[option]})
    assert list(found) != before and len(world.builds()) == 2


def test_samples_follow_one_line_of_the_data(world):
    before = list(world.open())
    world.rows[2]["messages"][1]["content"] = "answer 7"
    world.write(world.rows)
    assert [sample.id for sample, old in zip(world.same_as_without(), before, strict=True) if sample != old] == [2]


def test_samples_follow_tokenizer_files_changed_in_place(world):
    before = list(world.open())
    path = world.hf / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = []
    path.write_text(json.dumps(tokenizer))
    assert list(world.same_as_without()) != before


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
