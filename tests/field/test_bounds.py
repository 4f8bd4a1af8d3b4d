"""The pixel bounds of an image: set in every way, refused where they contradict, and carried into what a run exports."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from mm_models.cli.convert import main
from mm_models.config.data import DataConfig
from mm_models.config.fsdp2 import RunConfig, load_config
from mm_models.config.strict import validate
from mm_models.data.examine import Examiner, make_processor
from mm_models.errors import UserError
from mm_models.fsdp2 import validation as fsdp2
from mm_models.mcore.arguments import parse
from mm_models.mcore.validation import plan
from tests.data import kit
from tests.fsdp2 import trainer_kit
from tests.harness import run
from tests.mcore import training_kit

YAML = Path(__file__).parents[2] / "examples/glm4.5v/glm4_5v_debug.yaml"
KEY = "data.dataset_param.preprocess_parameters"
NAMES = ("image_min_pixels", "image_max_pixels")


def data_json(folder: Path, tmp_path: Path, **bounds: int) -> DataConfig:
    return flags(folder, tmp_path, bounds)


def command_line(folder: Path, tmp_path: Path, **bounds: int) -> DataConfig:
    return flags(folder, tmp_path, {}, *(f"--{name.replace('_', '-')}={value}" for name, value in bounds.items()))


def flags(folder: Path, tmp_path: Path, stated: dict[str, int], *words: str) -> DataConfig:
    """What the Megatron target makes of data.json and `words`."""
    files = training_kit.tiny_files(tmp_path / "json")
    content = json.loads(kit.BASE)
    parameters = content["dataset_param"]["preprocess_parameters"]
    parameters |= {"model_name_or_path": str(folder), **dict.fromkeys(NAMES), **stated}
    (tmp_path / "json/data.json").write_text(json.dumps(content))
    steps = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--from-scratch"]
    return plan(parse([*files, *steps, *words]), 1).data


def yaml(folder: Path, tmp_path: Path, **bounds: int) -> DataConfig:
    lines = [line for line in YAML.read_text().splitlines() if line.partition(":")[0].strip() not in NAMES]
    at = next(index for index, line in enumerate(lines) if "split_special_tokens" in line)
    lines[at:at] = [f"      {name}: {value}" for name, value in bounds.items()]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    return load_config(tmp_path / "run.yaml", [f"{KEY}.model_name_or_path={folder}"]).data


def overrides(folder: Path, tmp_path: Path, **bounds: int) -> DataConfig:
    given = {**dict.fromkeys(NAMES, "null"), **bounds, "model_name_or_path": folder}
    return load_config(YAML, [f"{KEY}.{name}={value}" for name, value in given.items()]).data


WAYS = pytest.mark.parametrize("way", [data_json, command_line, yaml, overrides], ids=lambda way: way.__name__)


@WAYS
@pytest.mark.parametrize(
    ("side", "bounds", "tokens"),
    [
        (560, {"image_max_pixels": 112 * 112}, 16),
        (560, {"image_max_pixels": 56 * 56}, 4),
        (56, {"image_min_pixels": 224 * 224, "image_max_pixels": 448 * 448}, 64),
    ],
    ids=str,
)
def test_bounds_act_however_they_are_set(way, side, bounds, tokens, tmp_path):
    """B49: data.json, the YAML, flags of one target and overrides of the other: as many image tokens as the bounds allow."""
    config = way(kit.processor_folder(tmp_path / "hf"), tmp_path, **bounds)
    picture = kit.picture(tmp_path / "a.png", side, side)
    found = Examiner.load(config, decode=True).examine(0, kit.row("<image>", "b", images=[str(picture)])).sample
    assert found.ids.count(make_processor(config).image_token_id) == tokens
    bounds = {"image_min_pixels": 784, "image_max_pixels": 12544} | bounds
    assert config.image_bounds().record() == bounds  # what a checkpoint will say


@WAYS
@pytest.mark.parametrize(
    "bounds", [{"image_min_pixels": 50176}, {"image_min_pixels": 50176, "image_max_pixels": 12544}]
)
def test_a_minimum_above_the_maximum_is_refused(way, bounds, tmp_path):
    """B49: with both numbers, one of them the folder's own too."""
    with pytest.raises(UserError, match="image_min_pixels 50176 exceeds image_max_pixels 12544"):
        way(kit.processor_folder(tmp_path / "hf"), tmp_path, **bounds).image_bounds()


def test_a_flag_wins_over_data_json(tmp_path):
    """B49: bound by bound, and contradictions are found after that."""
    folder, stated = kit.processor_folder(tmp_path / "hf"), {"image_min_pixels": 1568, "image_max_pixels": 3136}
    found = flags(folder, tmp_path, stated, "--image-max-pixels", "6272").image_bounds()
    assert (found.least, found.most) == (1568, 6272)
    with pytest.raises(UserError, match="image_min_pixels 1568 exceeds image_max_pixels 784"):
        flags(folder, tmp_path, stated, "--image-max-pixels", "784")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """`hf`, the quickstart's checkpoint, its `model.json`, and `data.json` over one picture of 560 x 560."""
    folder = tmp_path_factory.mktemp("bounds")
    training_kit.quickstart("make_checkpoint").write_checkpoint(folder / "hf")
    kit.picture(folder / "a.png", 560, 560)
    data = kit.data_config(folder / "hf", folder, [kit.row("<image>What?", "That.", images=["a.png"])] * 2)
    training_kit.World(folder=folder).model()
    (folder / "data.json").write_text(data.model_dump_json())
    return folder


def mcore_run(rank: int, world: Path, save: Path) -> str:
    files = [
        "--mm-model",
        str(world / "model.json"),
        "--mm-data",
        str(world / "data.json"),
        "--load",
        str(world / "hf"),
    ]
    steps = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--save", str(save)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        training_kit.train(rank, [*files, *steps, "--image-max-pixels", "3136", "--image-min-pixels", "1568"])
    return said.getvalue()


def fsdp2_run(rank: int, world: Path, save: Path) -> str:
    from mm_models.fsdp2 import training

    raw = trainer_kit.config(world / "hf", training__train_iters=1, training__save=str(save))
    raw["data"] = json.loads((world / "data.json").read_text())
    raw = trainer_kit.changed(raw, {f"{KEY}.image_max_pixels": 3136, f"{KEY}.image_min_pixels": 1568})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        training.train(fsdp2.plan(validate(RunConfig, raw, "the test"), 1, "cpu"))
    return said.getvalue()


@pytest.mark.parametrize(("case", "verb"), [(mcore_run, "mm_to_hf --mm"), (fsdp2_run, "dcp_to_hf --dcp")])
def test_the_export_of_a_run_resizes_as_training_did(case, verb, world, tmp_path, capsys):
    """B49: the bounds of the command line, of which the exporting command is told nothing."""
    from transformers import AutoImageProcessor

    (said,) = run(case, 1, world, tmp_path / "save", timeout=90)
    assert "data images: 1568 to 3136 pixels after resizing" in said
    words = [*verb.split(), str(tmp_path / "save"), "--hf", str(world / "hf"), "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    told = "image bounds: 1568 to 3136 pixels, as the checkpoint was trained (the reference has 784 to 12544 pixels)"
    assert told in capsys.readouterr().err
    found = AutoImageProcessor.from_pretrained(tmp_path / "out")(images=[kit.pattern(560, 560)], return_tensors="pt")
    assert found["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert main([*words, str(tmp_path / "other"), "--image-max-pixels", "6272"]) == 0
    told = "1568 to 6272 pixels, as asked for (the checkpoint was trained with 1568 to 3136 pixels; the reference has"
    assert told in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none"), "--image-min-pixels", "6272"]) == 2
    assert "image_min_pixels 6272 exceeds image_max_pixels 3136" in capsys.readouterr().err
    assert not list(tmp_path.glob("none*"))
