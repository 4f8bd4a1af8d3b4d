"""A file of rows: kept, dropped with a reason, or refused by number (field cases B14, B58)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mm_models.data.dataset import ChatDataset
from mm_models.errors import UserError
from tests.data import kit

GOOD = kit.row("hello", "world")


@pytest.fixture
def make(folder, processor, template, tmp_path):
    """A data set over rows; pictures are put beside them by the test."""

    def build(rows, **changes):
        config = kit.data_config(folder, tmp_path, rows, **changes)
        return ChatDataset(config, processor, template)

    return build


def refusal(make, *rows, **changes):
    with pytest.raises(UserError) as caught:
        make(list(rows), **changes)
    return str(caught.value)


class TestRows:
    def test_a_bad_row_is_refused_by_file_and_number(self, make, tmp_path):
        text = refusal(make, GOOD, GOOD, kit.row("<image>a", "b"))
        assert f"{tmp_path}/train.json: 1 of 3 rows refused" in text
        assert "row 2: 1 <image> marks in the text, 0 images" in text

    def test_all_bad_rows_are_counted_and_ten_shown(self, make):
        text = refusal(make, GOOD, *[kit.row("a")] * 12)
        assert (
            "12 of 13 rows refused" in text and "row 10:" in text and "row 11:" not in text and "and rows 11-12" in text
        )

    def test_jsonl(self, make, folder, processor, template, tmp_path):
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(GOOD) for _ in range(3)) + "\n\n")
        config = kit.data_config(folder, tmp_path, dataset="train.jsonl")
        assert len(ChatDataset(config, processor, template)) == 3
        (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n{]\n")
        with pytest.raises(UserError, match=r"train.jsonl: line 2 is not valid JSON"):
            ChatDataset(config, processor, template)

    def test_files_that_are_not_data(self, make, folder, processor, template, tmp_path):
        config = kit.data_config(folder, tmp_path)
        for text, message in (
            ("1", "begins with .1., expected a list of rows"),
            ("[1", "line 1 column"),
            ("{}\n{", "line 2 is not valid JSON"),
        ):
            (tmp_path / "train.json").write_text(text)
            with pytest.raises(UserError, match=message):
                ChatDataset(config, processor, template)
        with pytest.raises(UserError, match=r"'absent.json': no such file; looked at .* and .*absent.json"):
            ChatDataset(kit.data_config(folder, tmp_path, dataset="absent.json"), processor, template)

    def test_max_samples_takes_the_first_rows(self, make):
        assert [sample.id for sample in make([GOOD] * 5, max_samples=3)] == [0, 1, 2]

    def test_validation_rows(self, folder, processor, template, tmp_path):
        (tmp_path / "val.json").write_text(json.dumps([GOOD] * 4))
        config = kit.data_config(folder, tmp_path, [GOOD], val_dataset="val.json", val_max_samples=2)
        assert len(ChatDataset(config, processor, template, split="valid")) == 2
        with pytest.raises(UserError, match="val_dataset and val_rate are null"):
            ChatDataset(kit.data_config(folder, tmp_path), processor, template, split="valid")

    def test_no_row_is_trained_and_validated(self, folder, processor, template, tmp_path):
        """Not under another name either. Training alone does not look at `val_dataset`."""
        (tmp_path / "link.json").symlink_to("train.json")
        for names, words in (
            (["val.json", "train.json"], f"both name {tmp_path}/train.json: validation would see rows"),
            ("link.json", f"both name {tmp_path}/train.json"),
            ("gone.json", "dataset 'gone.json': no such file"),
        ):
            (tmp_path / "val.json").write_text(json.dumps([GOOD]))
            config = kit.data_config(folder, tmp_path, [GOOD], val_dataset=names)
            with pytest.raises(UserError, match=words):
                ChatDataset(config, processor, template, split="valid")
            assert len(ChatDataset(config, processor, template)) == 1


class TestDropped:
    def test_nothing_left(self, make):
        text = refusal(make, GOOD, GOOD, cutoff_len=5)
        assert "no sample is left of 2 rows" in text and "longer than cutoff_len 5: 2 rows: 0-1" in text

    def test_no_answer_to_learn_from(self, make):
        """B14: end tokens alone are nothing to learn from."""
        found = make([kit.row("q", " \n"), GOOD, kit.row("q", "", "q", "a")])
        assert [sample.id for sample in found] == [1, 2]
        assert found.report.dropped == {"no answer to learn from": [0]}
        assert "no sample is left" in refusal(make, kit.row("q", ""))

    def test_every_sample_has_labels(self, make):
        assert all(sample.labelled > 1 for sample in make([GOOD, kit.row("q", "", "q", "a")]))


def test_the_report_names_what_happened(make):
    found = make([GOOD, kit.row("what is <|image|>?", "a"), kit.row("q", "") | {"tools": "[]"}, GOOD | {"system": "s"}])
    first, dropped, *notes = found.report.lines()
    assert "3 of 4 rows" in first and "0 images" in first
    assert dropped == "data dropped: no answer to learn from: 1 rows: 2"
    assert notes == [
        "data note: 'system' is not read, attr does not name it: 1 rows: 3",
        "data note: 'tools' is not read, attr does not name it: 1 rows: 2",
        "data note: text that looks like a template token is kept as text: <|image|>: 1 rows: 1",
    ]


def test_the_base_folder_of_the_file_is_tried_second(make, folder, processor, template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = kit.data_config(folder, tmp_path, [GOOD], dataset="train.json")
    assert ChatDataset(config, processor, template).report.places.files == (Path(tmp_path, "train.json"),)
    assert not os.path.exists("train.json")


@pytest.fixture
def several(folder, processor, template, tmp_path):
    """Files of 5, 3 and 4 rows; rows 1 and 6 have no answer. `open` opens a split of them."""
    texts = [kit.row(f"row {index}", "" if index in (1, 6) else "a") for index in range(12)]
    (tmp_path / "a.json").write_text(json.dumps(texts[:5]))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, texts[5:8])))
    (tmp_path / "c.json").write_text(json.dumps(texts[8:]))

    def open_split(split="train", **changes):
        changes = {"dataset": "a.json, b.jsonl,c.json"} | changes
        return ChatDataset(kit.data_config(folder, tmp_path, **changes), processor, template, split=split)

    return open_split


def ids(found):
    return [sample.id for sample in found]


class TestSeveralFiles:
    def test_rows_are_numbered_through_and_named_within(self, several, tmp_path):
        found = several()
        assert ids(found) == [0, 2, 3, 4, 5, 7, 8, 9, 10, 11] and found.sizes == (4, 2, 4)
        assert ids(several(dataset=["a.json", "b.jsonl", "c.json"])) == ids(found)
        lines = found.report.lines()
        assert lines[1:4] == [f"data {tmp_path}/{name} rows" for name in ("a.json: 4", "b.jsonl: 2", "c.json: 4")]
        assert lines[4].endswith(f"2 rows: {tmp_path}/a.json 1; {tmp_path}/b.jsonl 1")

    def test_refused_rows_are_named_within_their_file(self, several, tmp_path):
        (tmp_path / "c.json").write_text(json.dumps([GOOD, 5, GOOD, 7]))
        with pytest.raises(
            UserError, match=r"2 of 12 rows refused(?s:.*)c.json: row 1: got int(?s:.*)c.json: row 3: got int"
        ):
            several()

    def test_max_samples_counts_through_all_files(self, several):
        assert ids(several(max_samples=6)) == [0, 2, 3, 4, 5]

    def test_val_rate_keeps_the_last_share_of_each_file(self, several):
        """floor(0.5 x rows): 2, 1 and 2."""
        assert ids(several(val_rate=0.5)) == [0, 2, 5, 8, 9]
        found = several("valid", val_rate=0.5)
        assert ids(found) == [3, 4, 7, 10, 11] and found.sizes == (2, 1, 2) and found.report.rows == 5
        assert ids(several("valid", val_rate=0.5, val_max_samples=3)) == [3, 4, 7]
        assert ids(several("valid", val_rate=0.5, max_samples=4)) == [2, 3]
        with pytest.raises(UserError, match=r"val_rate 0.1 of 5 and 3 and 4 rows is no row"):
            several("valid", val_rate=0.1)


def test_ranks_without_a_cache_are_told(folder, processor, template, tmp_path, monkeypatch):
    """One remark, and none where there is one process or a cache."""

    def remarks(**changes):
        config = kit.data_config(folder, tmp_path, [kit.row("q", "a")], **changes)
        return [line for line in ChatDataset(config, processor, template).report.lines() if "each of" in line]

    assert remarks() == []
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert remarks() == ["data cache_dir is null: each of 8 ranks examines all rows for itself"]
    assert remarks(cache_dir=str(tmp_path / "cache")) == []
