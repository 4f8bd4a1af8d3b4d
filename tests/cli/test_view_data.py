"""`mm-models view-data`: what is shown is what a run trains on, in the terminal and on a page that needs no other file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from mm_models.cli.models import main
from mm_models.cli.view_data import look
from mm_models.data.selection import open_split
from tests.data import kit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.processor_folder(tmp_path_factory.mktemp("view") / "hf")


@pytest.fixture(scope="module")
def config(folder):
    """Five rows: two with images (the second with two), one too long, one that is refused, one of Chinese text."""
    base = folder.parent / "data"
    for name, seed in (("a.png", 1), ("b<i>.png", 2)):
        kit.picture(base / name, 100 + 28 * seed, 84, seed)
    rows = [
        kit.row("<image>What is <b>this</b>?", "A cat.\nTwo lines.", "And?", "No more.", images=["a.png"]),
        kit.row("<image>left <image>right", "Same.", images=["a.png", "b<i>.png"]),
        kit.row("long " * 200, "yes"),
        kit.row("<image>gone", "yes", images=["gone.png"]),
        kit.row("\u753b\u50cf", "yes"),
    ]
    return kit.data_config(folder, base, rows, cutoff_len=200)


@pytest.fixture(scope="module")
def path(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "data.json"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    return path


def test_the_runs_are_the_sample(config):
    """Every token is shown once, trained where it is trained; an image's run is its tokens."""
    for view in look(config, 0, 2):
        sample = view.outcome.sample
        assert sum(run.count for run in view.runs) == len(sample.ids)
        spans = [(run.start, run.start + run.count) for run in view.runs if run.trained]
        assert spans == list(sample.trained)
        assert [run.count for run in view.runs if run.image] == [picture.tokens for picture in view.pictures]
    first, second = look(config, 0, 2)
    assert [run.text for run in first.runs if run.trained] == ["A cat.\nTwo lines.<|user|>", "No more.<|user|>"]
    assert [picture.size for picture in second.pictures] == [(128, 84), (156, 84)]
    assert all(p.used == (p.grid[2] * 14, p.grid[1] * 14) for p in second.pictures)


def test_the_terminal(path, capsys):
    assert main(["view-data", "--mm-data", str(path), "--index", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("row 0 (") and re.search(r"tokens of at most 200 \(cutoff_len\); \d+ trained", lines[1])
    assert any(re.fullmatch(r"  image   \| .*a\.png: 128 x 84, used as .* tokens", line) for line in lines)
    assert "  trained | A cat." in lines and "  trained | Two lines.<|user|>" in lines
    assert "          | <|end_of_image|>What is <b>this</b>?<|assistant|>" in lines


def test_a_row_that_is_no_sample_is_shown_with_the_reason(path, capsys):
    assert main(["view-data", "--mm-data", str(path), "--index", "2"]) == 0
    assert "LEFT OUT: longer than cutoff_len 200" in capsys.readouterr().out
    assert main(["view-data", "--mm-data", str(path), "--index", "3"]) == 1
    assert "REFUSED: image" in capsys.readouterr().out


def test_the_page_is_self_contained_and_escaped(path, tmp_path):
    out = tmp_path / "new" / "page.html"
    assert main(["view-data", "--mm-data", str(path), "--index", "0", "--count", "4", "--html", str(out)]) == 1
    text = out.read_text(encoding="utf-8")
    assert text.count("<h2>") == 4 and text.count("data:image/png;base64,") == 3
    assert not re.search(r"""(src|href)=["'](?!data:)|<link|<script|@import|url\(""", text)
    assert "&lt;b&gt;this&lt;/b&gt;" in text and "<b>" not in text and "b&lt;i&gt;.png" in text and "<i>" not in text
    assert "<mark>A cat.\nTwo lines.&lt;|user|&gt;</mark>" in text


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"max_samples": 2}, [None, None, "max_samples 2 takes rows 0-1", "max_samples 2 takes rows 0-1"]),
        (
            {"val_rate": 0.5},
            [None, None, "val_rate 0.5 keeps it for validation", "val_rate 0.5 keeps it for validation"],
        ),
        ({"max_samples": 3, "val_rate": 0.4}, [None, None, "val_rate 0.4 keeps it", "max_samples 3 takes rows 0-2"]),
    ],
)
def test_a_row_outside_the_training_split_says_so(folder, capsys, changes, reasons):
    """What is shown of it is what it would be; a run has no such row."""
    rows = [kit.row(f"row {index}", "yes") for index in range(4)]
    config = kit.data_config(folder, folder.parent / "split", rows, **changes)
    views = look(config, 0, 4)
    assert all(view.outcome.sample for view in views)
    trained = open_split(config.dataset_param.basic_parameters, "train")
    assert [trained.row(index) for index in range(len(trained))] == [
        at for at, why in enumerate(reasons) if why is None
    ]
    for view, reason in zip(views, reasons, strict=True):
        found = [fact for fact in view.facts() if fact.startswith("NOT TRAINED: ")]
        assert len(found) == bool(reason) and (not reason or reason in found[0])


def test_what_a_terminal_would_obey_is_written_out(folder, tmp_path, capsys):
    """Colours, a cleared screen, a turned direction, a line break in a file name: in the terminal and on the page."""
    kit.picture(tmp_path / "two\nlines.png")
    text = "\x1b[2J\r<image>\x00 \u202egnp\u202c a\tb\nc \u0645\u200c\u0646"
    config = kit.data_config(folder, tmp_path, [kit.row(text, "\x9bm", images=["two\nlines.png"])])
    (tmp_path / "data.json").write_text(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    argv = ["view-data", "--mm-data", str(tmp_path / "data.json"), "--index", "0"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert main([*argv, "--html", str(tmp_path / "page.html")]) == 0
    for found in (shown, (tmp_path / "page.html").read_text(encoding="utf-8")):
        assert r"\x1b[2J\r" in found and r"\x00 \u202egnp\u202c a" in found and r"\x9bm" in found
        assert r"two\nlines.png: 112 x 112" in found and "\u0645\u200c\u0646" in found
        assert not set(found) & set("\x1b\r\x00\x9b\u202e\u202c")


def test_a_terminal_of_another_encoding(path):
    """What it cannot write is escaped, not an end of the command."""
    code = "import sys; from mm_models.cli.models import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "view-data", "--mm-data", str(path), "--index", "4"]
    done = subprocess.run(argv, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert rb"\u753b\u50cf" in done.stdout


def test_refusals(path, capsys, tmp_path):
    for argv, words in (
        (["--mm-data", str(path), "--index", "3", "--count", "3"], "there are 5 rows, the last is 4"),
        (["--mm-data", str(path), "--index", "0", "--html", str(tmp_path)], "cannot be written (Is a directory)"),
        (["--mm-data", str(path), "--index", "0", "--html", f"{path}/a.html"], "cannot be written (File exists)"),
        (["--index", "0"], "--mm-data or --config"),
        (["--mm-data", str(path), "--index", "0", "a.b=1"], "belongs to --config"),
    ):
        assert main(["view-data", *argv]) == 2
        assert words in capsys.readouterr().err
