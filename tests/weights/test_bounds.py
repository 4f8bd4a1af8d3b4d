"""Field case B49: an exported processor resizes as training did, whatever file and spelling its bounds stand in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_models.config.bounds import UNSAID, Bounds, Stated
from mm_models.data.processor import image_grid, load_processor, pixel_bounds
from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import dcp_verbs, verbs
from mm_models.weights.dcp.folder import open_dcp
from mm_models.weights.hfoutput import copy_files, image_bounds
from mm_models.weights.manifest import open_checkpoint
from tests.data import kit
from tests.weights.folders import QUIET, copy, resplit, to_hf, to_mm
from tests.weights.test_foreign import field_folder

FAMILIES = ("glm4v_moe", "glm4v", "qwen2_vl", "qwen2_5_vl")
TRAINED = {"image_min_pixels": 1568, "image_max_pixels": 3136}


def in_processor_config(folder: Path, settings: dict, name: str) -> None:
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings, "processor_class": name}))


def in_preprocessor_config(folder: Path, settings: dict, name: str) -> None:
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "processor_class": name}))


def in_both(folder: Path, settings: dict, name: str) -> None:
    """The older file says something else, and is not read."""
    in_preprocessor_config(folder, {**settings, "size": {"shortest_edge": 1, "longest_edge": 2}}, name)
    in_processor_config(folder, settings, name)


def beside_a_bare_one(folder: Path, settings: dict, name: str) -> None:
    in_preprocessor_config(folder, settings, name)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}))


FILES = (in_processor_config, in_preprocessor_config, in_both, beside_a_bare_one)


def edges(least: int, most: int) -> dict:
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def older_names_in_size(least: int, most: int) -> dict:
    return {"size": {"min_pixels": least, "max_pixels": most}}


def older_names(least: int, most: int) -> dict:
    return {"min_pixels": least, "max_pixels": most}


def older_names_that_win(least: int, most: int) -> dict:
    return {**edges(least + 784, most - 784), **older_names(least, most)}


def older_names_without_effect(least: int, most: int) -> dict:
    return {**edges(least, most), **older_names(least + 784, most - 784)}


SPELLINGS = {
    "glm4v_moe": (edges, older_names_in_size, older_names_without_effect),
    "glm4v": (edges, older_names_in_size, older_names_without_effect),
    "qwen2_vl": (edges, older_names_in_size, older_names, older_names_that_win),
    "qwen2_5_vl": (edges, older_names_in_size, older_names, older_names_that_win),
}
"""How a family's folders say their bounds; transformers reads GLM's older names for none of them."""
CASES = [(family, file, spelling) for family in FAMILIES for file in FILES for spelling in SPELLINGS[family]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("processors")
    return {family: kit.processor_folder(base / family, family) for family in FAMILIES}


def written(folder: Path, to: Path, file: Callable, spelling: Callable) -> Path:
    """A copy of a processor's folder whose bounds, 784 and 12544 pixels, stand in `file` as `spelling` has them."""
    shutil.copytree(folder, to)
    content = json.loads((to / "processor_config.json").read_text())
    settings, unit = content["image_processor"], 2 if content["processor_class"] == "Glm4vProcessor" else 1
    del settings["size"]
    file(to, {**settings, **spelling(784 * unit, 12544 * unit)}, content["processor_class"])
    return to


def exported(folder: Path, to: Path, bounds: Bounds) -> Path:
    to.mkdir()
    copy_files(folder, to, image_bounds(folder, bounds.record(), UNSAID, lambda text: None))
    return to


def grid(folder: Path, side: int) -> list[int]:
    """Hugging Face's own, of a square picture."""
    from transformers import AutoImageProcessor

    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    return images(images=[kit.pattern(side, side)], return_tensors="pt")["image_grid_thw"][0].tolist()


@pytest.mark.parametrize(("family", "file", "spelling"), CASES)
def test_hugging_face_resizes_an_export_as_training_did(folders, tmp_path, family, file, spelling):
    folder = written(folders[family], tmp_path / "hf", file, spelling)
    assert Stated.of(folder).bounds == Bounds(least=784, most=12544)
    assert pixel_bounds(load_processor(folder)) == (784, 12544)
    for number, (least, most, side, tokens) in enumerate(
        [(1568, 56 * 56, 560, 4), (784, 112 * 112, 560, 16), (224 * 224, 448 * 448, 56, 64), (0, 28 * 28, 560, 1)]
    ):
        out = exported(folder, tmp_path / str(number), Bounds(least=least, most=most))
        trained = image_grid(load_processor(folder, image_min_pixels=least, image_max_pixels=most), side, side)
        assert grid(out, side) == list(trained) and trained[1] * trained[2] == 4 * tokens
        assert pixel_bounds(load_processor(out))[1] == most
        for name, content in ((path.name, json.loads(path.read_text())) for path in out.glob("*processor_config.json")):
            settings = content if name.startswith("pre") else content.get("image_processor", {})
            sizes = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
            if most != 12544:  # every statement there is, for other readers of these files
                assert all(sizes[edge] in (None, value) for edge, value in settings.get("size", {}).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_says_it_already_keeps_its_bytes(folders, tmp_path, family):
    for number, file in enumerate(FILES[:2]):
        folder = written(folders[family], tmp_path / f"hf{number}", file, edges)
        out = exported(folder, tmp_path / f"out{number}", Bounds(least=784, most=12544))
        for path in folder.iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_bound_that_nobody_says_is_asked_for(folders, tmp_path):
    folder = written(folders["qwen2_vl"], tmp_path / "hf", in_preprocessor_config, lambda least, most: {})
    with pytest.raises(UserError, match="size has no shortest_edge and longest_edge"):
        exported(folder, tmp_path / "out", Bounds(most=3136))
    folder = written(
        folders["qwen2_vl"], tmp_path / "half", in_preprocessor_config, lambda least, most: {"max_pixels": most}
    )
    out = exported(folder, tmp_path / "same", Bounds(most=12544))
    assert (out / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()


@pytest.fixture
def whole(hf, folders, tmp_path) -> Path:
    """The tiny GLM-4.5V with its processor's files."""
    return Path(shutil.copytree(folders["glm4v_moe"], copy(hf, tmp_path / "hf"), dirs_exist_ok=True))


def trained(mm: Path, **bounds: int) -> Path:
    """A checkpoint whose manifest says it comes from a run with `bounds`."""
    file = open_checkpoint(mm).folder / "manifest.json"
    content = json.loads(file.read_text())
    content["source"] = {"kind": "training", "iteration": 1, "consumed_train_samples": 4, **bounds}
    file.write_text(json.dumps(content))
    return mm


def test_bounds_go_through_every_conversion(whole, tmp_path):
    mm = trained(to_mm(whole, tmp_path / "mm", tp=2), **TRAINED)
    again = resplit(mm, tmp_path / "again", pp=2)
    dcp_verbs.mm_to_dcp(open_checkpoint(again), tmp_path / "dcp", hf=whole, options=QUIET)
    assert Stated.of(tmp_path / "dcp").bounds == Bounds.of(TRAINED)  # the files beside it
    assert Bounds.of(open_dcp(tmp_path / "dcp").manifest.source) == Bounds.of(TRAINED)
    dcp_verbs.dcp_to_hf(tmp_path / "dcp", whole, tmp_path / "one", options=QUIET)
    back = verbs.Target(layout=ParallelLayout())
    dcp_verbs.dcp_to_mm(tmp_path / "dcp", tmp_path / "mm2", back, options=QUIET)
    for out in (tmp_path / "one", to_hf(tmp_path / "mm2", whole, tmp_path / "two")):
        assert Stated.of(out).bounds == Bounds.of(TRAINED) and grid(out, 560) == [1, 4, 4]


def test_which_bounds_are_written_is_told(whole, tmp_path):
    mm = to_mm(whole, tmp_path / "mm")
    said: list[str] = []

    def export(name: str, **bounds: int) -> list[str]:
        said.clear()
        options = verbs.Options(say=said.append, bounds=Bounds.of(bounds))
        verbs.mm_to_hf(open_checkpoint(mm), whole, tmp_path / name, options=options)
        return [line for line in said if "image bounds" in line]

    assert export("release") == []
    assert export("asked", image_max_pixels=3136) == [
        "image bounds: 784 to 3136 pixels, as asked for (the reference has 784 to 12544 pixels)"
    ]
    trained(mm)
    assert "does not say what it was trained with" in export("older")[0]
    trained(mm, image_min_pixels=784, image_max_pixels=12544)
    assert export("same") == ["image bounds: 784 to 12544 pixels, as the checkpoint was trained"]


def test_a_checkpoint_of_the_field_does_not_say(whole, tmp_path, capsys):
    from mm_models.cli.convert import main

    field = field_folder(to_mm(whole, tmp_path / "mm"), tmp_path / "field")
    words = ["mm_to_hf", "--mm", str(field), "--hf", str(whole), "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    assert "does not say what it was trained with (--image-min-pixels and" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "two"), "--image-min-pixels", "1568", "--image-max-pixels", "3136"]) == 0
    assert grid(tmp_path / "one", 560) == [1, 8, 8] and grid(tmp_path / "two", 560) == [1, 4, 4]


def test_bounds_that_contradict_leave_nothing(whole, tmp_path):
    mm = trained(to_mm(whole, tmp_path / "mm"), image_min_pixels=50176)
    with pytest.raises(UserError, match="image_min_pixels 50176 exceeds image_max_pixels 12544"):
        to_hf(mm, whole, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
