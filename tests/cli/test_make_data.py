"""`mm-models make-data`: the same bytes for the same options, and a data set that trains."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from mm_models.cli.models import main
from mm_models.config.data import Attributes
from mm_models.data.rows import parse_row


def make(out, *flags: str) -> int:
    return main(["make-data", "--samples", "3", "--images", "2", "--image-size", "40x30", *flags, "--out", str(out)])


def content(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_bytes_for_the_same_seed(tmp_path):
    for name, flags in {"a": (), "b": (), "c": ("--seed", "1")}.items():
        assert make(tmp_path / name, "--text-tokens", "10", *flags) == 0
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert a == b and a.keys() == c.keys() and len(a) == 7
    assert all(a[name] != c[name] for name in a)
    assert len(set(a.values())) == 7


def test_the_rows_are_rows_with_their_pictures(tmp_path):
    assert make(tmp_path / "d", "--text-tokens", "11") == 0
    for number, row in enumerate(json.loads((tmp_path / "d" / "train.json").read_text())):
        turns = parse_row(number, row, Attributes()).turns
        assert len(" ".join(turn.text.replace("<image>", "") for turn in turns).split()) == 11
        assert [Image.open(tmp_path / "d" / name).size for name in row["images"]] == [(40, 30)] * 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--image-size", "40"], "given twice"), (["--text-tokens", "1"], "at least 2"), (["--seed", "-1"], "at least 0")],
    ids=["size", "text", "seed"],
)
def test_refusals(tmp_path, capsys, flags, words):
    assert make(tmp_path / "d", *flags) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "d").exists()


@pytest.mark.parametrize("size", ["201x1", "1x201", "13378x13378", "0x1", "40"])
def test_a_picture_that_training_refuses(tmp_path, capsys, size):
    argv = ["make-data", "--samples", "1", "--image-size", size, "--out", str(tmp_path / "d")]
    assert main(argv) == 2
    assert f"--image-size: got '{size}', expected" in capsys.readouterr().err and not (tmp_path / "d").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file" / "d") == 2
    assert f"--out {tmp_path}/file/d: cannot be written (Not a directory)" in capsys.readouterr().err


def test_nothing_is_written_over_a_data_set(tmp_path, capsys):
    assert make(tmp_path) == 0 and make(tmp_path) == 2
    assert "holds a data set already" in capsys.readouterr().err
