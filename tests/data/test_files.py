"""Rows by number out of JSON, JSONL and Parquet files; faults by file and line."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from mm_models.data import files
from mm_models.data.files import RowFiles, find_files
from mm_models.errors import UserError

VALUES = [
    {"id": 0, "text": 'quote " brace } \\', "nested": [{"a": [1, 2.5e3]}, None, True]},
    {"id": 1, "text": "画像 é 🙂 \n"},
    {},
    {"id": 3, "text": "x" * 300},
]


def write(path, values, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(values), path, row_group_size=3)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(value, **options) + "\n\n" for value in values), encoding="utf-8")
    else:
        path.write_text(json.dumps(values, **options), encoding="utf-8")
    return path


@pytest.mark.parametrize("window", [1, 7, 1 << 22])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_every_row_wherever_a_window_ends(tmp_path, monkeypatch, name, ascii, indent, window):
    monkeypatch.setattr(files, "WINDOW", window)
    indent = None if name == "a.jsonl" else indent
    found = RowFiles.open([write(tmp_path / name, VALUES, ensure_ascii=ascii, indent=indent)])
    assert [found.read(row) for row in (3, 1, 0, 2)] == [VALUES[row] for row in (3, 1, 0, 2)]


def test_a_byte_order_mark_and_space_around(tmp_path):
    for name, text in (("a.json", ' [ {"a":1} ,\r\n\t{"a":2} ] \n'), ("b.jsonl", '{"a":1}\r\n  \r\n{"a":2}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        found = RowFiles.open([tmp_path / name])
        assert [found.read(row) for row in range(len(found))] == [{"a": 1}, {"a": 2}]


def test_parquet_by_row_groups(tmp_path):
    values = [{"id": index, "image": {"bytes": bytes([index]), "path": None}} for index in range(8)]
    found = RowFiles.open([write(tmp_path / "a.parquet", values)])
    order = random.Random(3).sample(range(8), 8)
    assert [found.read(row) for row in order] == [values[row] for row in order]
    assert len(RowFiles.open([tmp_path / "a.parquet"], limit=5)) == 5


def test_several_files_are_numbered_through(tmp_path):
    values = [{"id": index} for index in range(9)]
    paths = [
        write(tmp_path / "a.json", values[:4]),
        write(tmp_path / "b.parquet", values[4:7]),
        write(tmp_path / "c.jsonl", values[7:]),
    ]
    found = pickle.loads(pickle.dumps(RowFiles.open(paths)))
    assert [found.read(row) for row in range(9)] == values
    assert found.sizes == (4, 3, 2) and found.starts == (0, 4, 7, 9)
    assert [found.origin(row) for row in (3, 4, 8)] == [(paths[0], 3), (paths[1], 0), (paths[2], 1)]
    with pytest.raises(IndexError):
        found.read(9)
    assert RowFiles.open(paths, limit=5).sizes == (4, 1, 0)


FAULTS = {
    "top": ("a.json", b'{"a": 1}', "got dict at the top, expected a list of rows.*name the file .jsonl"),
    "lines": ("a.json", b"{}\n{}", "name the file .jsonl"),
    "cut": ("a.json", b"[1", r"line 1 column 3: Expecting ',' delimiter"),
    "open string": ("a.json", b'[\n{"a": "b', r"line 2 column 7: Unterminated string"),
    "column": ("a.json", b'[{"a": 1},\n {"a": }]', r"line 2 column 8: Expecting value"),
    "trailing comma": ("a.json", b"[1,\n]", r"line 2 column 1: Expecting value"),
    "after": ("a.json", b"[1]\n[2]", r"line 2 column 1: Extra data"),
    "utf": ("a.json", b'[{"a": "\xff"}]', "not UTF-8 text"),
    "deep": ("a.json", b"[" * 200000, "nested too deeply"),
    "line": ("a.jsonl", b"{}\n{]\n", "line 2 is not valid JSON"),
    "line utf": ("a.jsonl", b'{}\n\n"\xff"\n', "line 3 is not UTF-8 text"),
    "empty": ("a.json", b"", "the file has no rows"),
    "no rows": ("a.json", b" [ ] ", "the file has no rows"),
    "no lines": ("a.jsonl", b"\n\n", "the file has no rows"),
    "parquet": ("a.parquet", b"PAR1", "not a readable Parquet file"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_by_file_and_line(tmp_path, case):
    name, content, message = FAULTS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{tmp_path}/{name}: .*{message}"):
        RowFiles.open([write(tmp_path / "good.json", VALUES), tmp_path / name])


def test_a_file_that_changed_since(tmp_path):
    found = RowFiles.open([write(tmp_path / "a.json", VALUES)])
    (tmp_path / "a.json").write_text("[" + " " * 5000 + "]")
    with pytest.raises(UserError, match="row 1 cannot be read any more"):
        found.read(1)


def test_one_file_twice(tmp_path):
    write(tmp_path / "a.json", VALUES)
    with pytest.raises(UserError, match=r"twice .*give it a weight in dataset_weights"):
        find_files(["a.json", str(tmp_path / "a.json")], str(tmp_path))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_memory_is_bounded(tmp_path, monkeypatch, name):
    """6 MB of rows take two windows and two numbers each."""
    monkeypatch.setattr(files, "WINDOW", 1 << 16)
    write(tmp_path / name, [{"id": index, "text": "word " * 200} for index in range(6000)])
    tracemalloc.start()
    found = RowFiles.open([tmp_path / name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 6000 and found.read(5999)["id"] == 5999
    assert peak < 1 << 20, peak
