"""`mm-models convert-data llava`: the order is kept, nothing is left out unsaid, and the rows are rows of a data set."""

from __future__ import annotations

import hashlib
import json

import pytest
from PIL import Image

from mm_models.cli.models import main
from mm_models.config.data import Attributes
from mm_models.data.rows import parse_row


def llava(number: int, *, image: bool = True) -> dict:
    mark = "<image>\n" if image and number % 2 else "\n<image>" if image else ""
    question = f"{mark}question {number}" if number % 2 else f"question {number}{mark}"
    row = {"id": f"{number:012}", "conversations": [{"from": "human", "value": question}]}
    row["conversations"].append({"from": "gpt", "value": f"ünïcode answer {number}"})
    return row | ({"image": f"{number:012}.jpg"} if image else {})


@pytest.fixture
def files(tmp_path):
    """Seven rows, the fourth without an image, and the images in a folder."""
    folder = tmp_path / "train2017"
    folder.mkdir()
    rows = [llava(number, image=number != 3) for number in (5, 2, 9, 3, 1, 8, 4)]
    for row in rows:
        if "image" in row:
            Image.new("RGB", (8, 8)).save(folder / row["image"])
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    return tmp_path


def convert(files, *flags: str, out: str = "out.json") -> int:
    argv = ["--annotations", str(files / "llava.json"), "--images", str(files / "train2017")]
    return main(["convert-data", "llava", *argv, "--out", str(files / out), *flags])


def numbers(files) -> list[int]:
    return [int(row["messages"][1]["content"].split()[-1]) for row in json.loads((files / "out.json").read_text())]


def test_rows_keep_order_text_and_marks(files, capsys):
    assert convert(files, "--expect-images", "6") == 0
    rows = json.loads((files / "out.json").read_text(encoding="utf-8"))
    assert numbers(files) == [5, 2, 9, 3, 1, 8, 4]
    assert rows[0] == {
        "messages": [
            {"role": "user", "content": "<image>\nquestion 5"},
            {"role": "assistant", "content": "ünïcode answer 5"},
        ],
        "images": ["000000000005.jpg"],
    }
    assert rows[1]["messages"][0]["content"] == "question 2\n<image>" and rows[3]["images"] == []
    for number, row in enumerate(rows):
        parse_row(number, row, Attributes())
    digest = hashlib.sha256((files / "out.json").read_bytes()).hexdigest()
    assert f"7 samples, 6 images, in the order of the annotations, sha256 {digest}" in capsys.readouterr().out


def test_a_missing_image_is_an_error_unless_its_rows_may_be_left_out(files, capsys):
    """The seeds' case: an archive half unpacked shifted the order by 3,987 samples without a word."""
    (files / "train2017" / "000000000009.jpg").unlink()
    (files / "train2017" / "000000000008.jpg").write_bytes(b"")
    assert convert(files, "--expect-images", "6") == 2
    assert "holds 5 images, expected 6" in capsys.readouterr().err
    assert convert(files) == 2
    words = "2 images are missing or empty in"
    said = capsys.readouterr().err
    assert words in said and "2 of 7 rows name one: 000000000009.jpg, 000000000008.jpg. Nothing is written" in said
    assert not list(files.glob("*out.json*")) and not list(files.glob(".*"))
    assert convert(files, "--skip-missing") == 0
    said = capsys.readouterr().out
    assert words in said and "left out (--skip-missing): 000000000009.jpg" in said and "5 samples, 4 images" in said
    assert numbers(files) == [5, 2, 3, 1, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conversations": [{"from": "robot", "value": "hi"}]}, "role 'robot'"),
        ({"conversations": [{"from": "human", "value": "no mark"}, {"from": "gpt", "value": "a"}]}, "0 <image> marks"),
        ({"image": "http://host/a.jpg"}, "missing or empty"),
        ({"image": {"bytes": "aGk="}}, "an image is not a path"),
    ],
    ids=["role", "marks", "address", "bytes"],
)
def test_a_row_that_cannot_be_converted_is_named(files, capsys, change, words):
    rows = json.loads((files / "llava.json").read_text())
    rows[2] |= change
    (files / "llava.json").write_text(json.dumps(rows))
    assert convert(files, "--skip-missing") in (0, 2)
    said = "".join(capsys.readouterr())
    assert words in said
    if "missing" not in words:
        assert "row 2: " in said and not (files / "out.json").exists()


def test_refusals(files, capsys):
    (files / "out.json").write_text("mine")
    assert convert(files) == 2
    assert "exists already" in capsys.readouterr().err and (files / "out.json").read_text() == "mine"
    assert convert(files, "--overwrite") == 0
    assert main(["convert-data", "lava"]) == 2
    assert "did you mean 'llava'?" in capsys.readouterr().err


def test_what_is_not_read_is_noted(files, capsys):
    """A row's own column of a system text: the rows are as those without it."""
    rows = json.loads((files / "llava.json").read_text())
    (files / "llava.json").write_text(json.dumps([row | {"system": "be kind"} for row in rows[:2]] + rows[2:]))
    assert convert(files) == 0 and numbers(files) == [5, 2, 9, 3, 1, 8, 4]
    assert "note: 'system' is not read, attr does not name it: 2 rows: 0-1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("out", "words"),
    [("train2017", "not a file"), ("llava.json/x.json", "cannot be written (")],
    ids=["folder", "file"],
)
def test_an_output_that_cannot_be_written(files, capsys, out, words):
    assert convert(files, "--overwrite", out=out) == 2
    assert f"--out {files}/{out}: {words}" in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == ["llava.json", "train2017"]


def test_a_full_disk_leaves_nothing(files, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mm_models.cli.convert_data.os.replace", full)
    assert convert(files) == 2
    assert "out.json: cannot be written (No space left on device)" in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == ["llava.json", "train2017"]
