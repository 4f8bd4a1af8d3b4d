"""`mm-models view-data`: what is shown is what a run trains on, in the terminal and on a page that needs no other file."""

from __future__ import annotations

import json
import re

import pytest

from mm_models.cli.models import main
from mm_models.cli.view_data import look
from tests.data import kit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.processor_folder(tmp_path_factory.mktemp("view") / "hf")


@pytest.fixture(scope="module")
def config(folder):
    """Four rows: two with images (the second with two), one too long, one that is refused."""
    base = folder.parent / "data"
    for name, seed in (("a.png", 1), ("b<i>.png", 2)):
        kit.picture(base / name, 100 + 28 * seed, 84, seed)
    rows = [
        kit.row("<image>What is <b>this</b>?", "A cat.\nTwo lines.", "And?", "No more.", images=["a.png"]),
        kit.row("<image>left <image>right", "Same.", images=["a.png", "b<i>.png"]),
        kit.row("long " * 200, "yes"),
        kit.row("<image>gone", "yes", images=["gone.png"]),
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


def test_refusals(path, capsys):
    for argv, words in (
        (["--mm-data", str(path), "--index", "3", "--count", "2"], "there are 4 rows, the last is 3"),
        (["--index", "0"], "--mm-data or --config"),
        (["--mm-data", str(path), "--index", "0", "a.b=1"], "belongs to --config"),
    ):
        assert main(["view-data", *argv]) == 2
        assert words in capsys.readouterr().err
