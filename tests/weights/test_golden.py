"""MindSpeed-MM's own checkpoint of a small Qwen2.5-VL: ours is the same, theirs is read, and theirs is what ours is written as."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import assert_same_folder, copy, edit_state, model_config, to_hf, to_mm

GOLDEN = Path(__file__).parents[1] / "golden"
HF, THEIRS = GOLDEN / "qwen2_5vl_tiny_hf", GOLDEN / "qwen2_5vl_tiny_mm_tp1_pp2"
FILES = ["mp_rank_00_000/model_optim_rng.pt", "mp_rank_00_001/model_optim_rng.pt"]
LAYOUT = ["--cfg.parallel_config.llm_pp_layers", "[1,3]", "--cfg.parallel_config.vit_pp_layers", "[4,0]"]
LAYOUT += ["--cfg.parallel_config.tp_size", "1"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return to_mm(HF, tmp_path_factory.mktemp("golden") / "mm", vision=[4, 0], text=[1, 3], pp=2)


@pytest.fixture(scope="module")
def model_json(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "model.json"
    path.write_text(json.dumps(model_config(HF).model_dump(exclude_none=True)))
    return path


def content(folder: Path, file: str):
    return torch.load(folder / "release" / file, weights_only=True)


@pytest.mark.parametrize("file", FILES)
def test_ours_is_theirs_tensor_for_tensor(ours, file):
    """Names, shapes, data types and bits, file by file, and nothing over; torch's safe loader reads it."""
    got, expected = content(ours, file), content(THEIRS, file)
    assert got["checkpoint_version"] == expected["checkpoint_version"] == 3.0
    assert set(got) == set(expected) | {"iteration"} and set(got["model"]) == set(expected["model"])
    for name, tensor in expected["model"].items():
        mine = got["model"][name]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape) and torch.equal(mine, tensor), name
        assert mine.is_contiguous() and mine.untyped_storage().nbytes() == mine.nbytes, name


def test_ours_lies_where_their_loader_looks(ours):
    tracker = "latest_checkpointed_iteration.txt"
    assert (ours / tracker).read_bytes() == (THEIRS / tracker).read_bytes() == b"release"
    assert sorted(str(f.relative_to(ours / "release")) for f in ours.glob("release/*/*")) == FILES


def test_theirs_comes_back_byte_for_byte(tmp_path):
    """Their command, against their folder: no manifest, no model.json; the layout is the flags'."""
    command = ["Qwen2_5_VLConverter", "mm_to_hf", "--cfg.mm_dir", str(THEIRS), "--cfg.hf_config.hf_dir", str(HF)]
    assert main([*command, "--cfg.save_hf_dir", str(tmp_path / "out"), *LAYOUT]) == 0
    assert_same_folder(tmp_path / "out", HF)


def test_theirs_is_resplit(ours, tmp_path, model_json):
    command = [
        "Qwen2_5_VLConverter",
        "resplit",
        "--cfg.source_dir",
        str(THEIRS),
        "--cfg.target_dir",
        str(tmp_path / "mm"),
    ]
    command += [flag.replace("parallel_config", "source_parallel_config") for flag in LAYOUT]
    command += [
        "--cfg.target_parallel_config.llm_pp_layers",
        "[[0,1],[2,1]]",
        "--cfg.target_parallel_config.tp_size",
        "2",
    ]
    command += ["--cfg.target_parallel_config.vit_pp_layers", "[[2,2],[0,0]]", "--model", str(model_json)]
    assert main(command) == 0
    assert open_checkpoint(tmp_path / "mm").manifest.layout.flags() == "--tp 2 --pp 2 --vpp 2"
    assert compare(tmp_path / "mm", ours).equal and compare(tmp_path / "mm", HF).equal
    assert_same_folder(to_hf(tmp_path / "mm", HF, tmp_path / "out"), HF)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"llm_pp_layers": "[2,2]"}, "text_decoder.decoder.layers.2."),
        ({"llm_pp_layers": "[0,4]", "vit_pp_layers": "[3,1]"}, "image_encoder.encoder.blocks.layers.3."),
        ({"llm_pp_layers": "[1,2]"}, "sum 3, model 4"),
        ({"llm_pp_layers": "[[1,1],[1,1]]", "vit_pp_layers": "[[4,0],[0,0]]"}, "no key 'model0' (found model, checkpoint_version)"),
        ({"llm_pp_layers": "[1,3,0]", "vit_pp_layers": "[4,0,0]"}, "holds mp_rank_00_000, mp_rank_00_001; layout --pp 3 has"),
        ({"tp_size": "2"}, "holds mp_rank_00_000, mp_rank_00_001; layout --tp 2 --pp 2 has"),
        ({"ep_size": "2"}, "the model has no experts"),
    ],
    ids=str,
)  # fmt: skip
def test_flags_that_are_not_the_folders_are_refused_by_name(tmp_path, capsys, flags, words):
    given = {"llm_pp_layers": "[1,3]", "vit_pp_layers": "[4,0]", "tp_size": "1"} | flags
    layout = [part for name, value in given.items() for part in (f"--cfg.parallel_config.{name}", value)]
    command = ["mm_to_hf", "--mm", str(THEIRS), "--hf", str(HF), "--out", str(tmp_path / "out")]
    assert main([*command, *layout]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said, said
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_width_is_refused(tmp_path, capsys):
    """The files are of the shapes that the model asks for, or every one that is not is named."""
    hf = copy(HF, tmp_path / "hf")
    hf.chmod(0o755)
    edit_state(
        hf,
        lambda state: state.update(
            {"lm_head.weight": torch.zeros(328, 64), "model.embed_tokens.weight": torch.zeros(328, 64)}
        ),
    )
    text = json.loads((HF / "config.json").read_text())
    text["vocab_size"] = text["text_config"]["vocab_size"] = 328
    (hf / "config.json").write_text(json.dumps(text))
    command = ["mm_to_hf", "--mm", str(THEIRS), "--hf", str(hf), "--out", str(tmp_path / "out")]
    assert main([*command, *LAYOUT]) == 2
    assert "is (320, 64), expected (328, 64)" in capsys.readouterr().err


def test_one_of_their_files_missing_or_of_another_stage(tmp_path, capsys):
    command = ["mm_to_hf", "--mm", str(tmp_path / "mm"), "--hf", str(HF), "--out", str(tmp_path / "out"), *LAYOUT]
    path = copy(THEIRS, tmp_path / "mm") / "release"
    shutil.copyfile(path / FILES[0], path / FILES[1])
    assert main(command) == 2
    assert "mp_rank_00_001" in capsys.readouterr().err
    shutil.rmtree(path / "mp_rank_00_001")
    assert main(command) == 2
    assert "holds mp_rank_00_000; layout --pp 2 has" in capsys.readouterr().err and not (tmp_path / "out").exists()
