"""Rows by number out of JSON, JSONL and Parquet files; faults by file and line."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from mm_models.data import json_file
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
    monkeypatch.setattr(json_file, "WINDOW", window)
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
    "top": ("a.json", b'"a"', "begins with '\"', expected a list of rows"),
    "no json": ("a.json", b"a,b\n1,2", "begins with 'a', expected a list of rows"),
    "one object on lines": ("a.json", b'{\n"a": 1\n}', "line 1 is not valid JSON.* In JSONL each line is one row"),
    "comma behind a line": ("a.jsonl", b"{},\n{}", "line 1 is not valid JSON: Extra data. In JSONL each line"),
    "two arrays": ("a.jsonl", b"[{}]\n[{}]", r"line 2 column 1: Extra data"),
    "digits": (
        "a.json",
        b'[{"a": 1},\n{"a": ' + b"9" * 5000 + b"}]",
        r"line 2 column 1: Exceeds the limit \(4300 digits",
    ),
    "digits in a line": ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", r"line 1 is not valid JSON: Exceeds the limit"),
    "gzip": ("a.json.gz", gzip.compress(b"[{}]"), "a gzip archive; unpack it first"),
    "zip": ("a.json", b"PK\x03\x04", "a zip archive"),
    "arrow": ("a.arrow", b"ARROW1\0\0", "an Arrow file; write it as Parquet"),
    "utf-16": ("a.json", "[{}]".encode("utf-16"), "UTF-16 text; write it as UTF-8"),
    "utf-16 lines": ("a.jsonl", "{}\n{}\n".encode("utf-16-be"), "UTF-16 text or binary content, expected UTF-8"),
    "surrogate": ("a.jsonl", b'{"a": "\xed\xa0\x80"}', "line 1 is not UTF-8 text"),
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


def test_the_content_says_what_a_file_is(tmp_path):
    """As it is found in the field: lines in a .json, an array in a .jsonl, and names of no meaning."""
    array, lines, table = (write(tmp_path / f"a.{kind}", VALUES[3:]) for kind in ("json", "jsonl", "parquet"))
    for source, names in (
        (array, ["b.jsonl", "b.txt", "b"]),
        (lines, ["c.json", "c.ndjson", "c.JSONL"]),
        (table, ["d.json", "d.PARQUET", "d.jsonl"]),
    ):
        for name in names:
            (tmp_path / name).write_bytes(source.read_bytes())
            assert RowFiles.open([tmp_path / name]).read(0) == VALUES[3], name


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("change", ["content", "gone"])
def test_a_file_that_changed_since(tmp_path, name, change):
    """Also one that holds as many bytes: another row would stand where this one stood."""
    values = [{"id": 1, "text": "aaaa"}, {"id": 2, "text": "bbbb"}]
    path = write(tmp_path / name, values)
    found = pickle.loads(pickle.dumps(RowFiles.open([path])))
    assert found.read(0) == values[0]
    os.utime(path, ns=(0, 0))
    assert found.read(1) == values[1], "a file that is only touched"
    if change == "content":
        size, then = path.stat().st_size, path.stat().st_mtime_ns
        write(path, values[::-1])
        os.utime(path, ns=(then, then + 10**9))
        assert path.stat().st_size == size
    else:
        path.unlink()
    found = pickle.loads(pickle.dumps(found))
    with pytest.raises(UserError, match=f"{name}: .*(changed since the start|cannot be read any more)"):
        found.read(1)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_key_twice_in_an_object(tmp_path, name):
    """A JSON reader would keep the last and lose the other."""
    text = '{"messages": [{"role": "user", "content": "lost", "content": "kept"}]}'
    (tmp_path / name).write_text(f"[{{}},{text}]" if name == "a.json" else f"{{}}\n{text}\n")
    found = RowFiles.open([tmp_path / name])
    assert found.read(0) == {}
    with pytest.raises(UserError, match=f"{name}: row 1 has the key 'content' twice in one object"):
        found.read(1)


def test_a_parquet_file_that_is_broken_inside(tmp_path):
    """By row: pages that are no pages, a flipped bit where the file has checksums, text that is not UTF-8."""
    good = pa.table({"a": ["question and answer"] * 4})
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"q\xff")])
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    for table, mangle in (
        (good, lambda data: data.replace(b"question", b"guestion")),
        (good, lambda data: data[:4] + b"\xff" * 16 + data[20:]),
        (pa.table({"a": text}), lambda data: data),
    ):
        parquet.write_table(table, tmp_path / "a.parquet", **plain)
        (tmp_path / "a.parquet").write_bytes(mangle((tmp_path / "a.parquet").read_bytes()))
        with pytest.raises(UserError, match=r"a\.parquet: row 0 cannot be read \("):
            RowFiles.open([tmp_path / "a.parquet"]).read(0)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_whatever_bytes_a_file_has(tmp_path, name):
    """Bytes that are changed, lost and put in: rows, or one error that names the file."""
    draw, path = random.Random(name), tmp_path / name
    good = write(path, [{"text": f"é {index}", "nested": [{"a": [1.5]}]} for index in range(4)]).read_bytes()
    for _ in range(150):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 3))):
            at, size = draw.randrange(len(data)), draw.randrange(20)
            data[at : at + draw.choice((0, 1, size))] = draw.randbytes(draw.choice((0, 1, size)))
        path.write_bytes(data)
        try:
            found = RowFiles.open([path])
            rows = [found.read(row) for row in range(len(found))]
        except UserError as error:
            assert str(path) in str(error)
        else:
            assert rows


def test_columns_of_one_name(tmp_path):
    column = pa.array([1])
    parquet.write_table(pa.Table.from_arrays([column, column, column], names=["a", "b", "a"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: several columns named 'a'; keep one of each"):
        RowFiles.open([tmp_path / "a.parquet"])


def test_names_that_are_no_file(tmp_path, monkeypatch):
    (tmp_path / "shards").mkdir()
    for name, reason in (
        ("shards", f"{tmp_path}/shards is a folder; name the files in it"),
        ("x" * 5000, "File name too long"),
        ("x\0", "no such file"),
        ("gone.json", f"no such file; looked at .* and {tmp_path}/gone.json"),
    ):
        with pytest.raises(UserError, match=f"dataset .*: {reason}"):
            find_files([name], str(tmp_path))
    path = write(tmp_path / "a.json", VALUES)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", denied)
    with pytest.raises(UserError, match=r"a\.json: cannot be read \(Permission denied\)"):
        RowFiles.open([path])


def test_one_file_twice(tmp_path):
    write(tmp_path / "a.json", VALUES)
    with pytest.raises(UserError, match=r"twice .*give it a weight in dataset_weights"):
        find_files(["a.json", str(tmp_path / "a.json")], str(tmp_path))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_memory_is_bounded(tmp_path, monkeypatch, name):
    """6 MB of rows take two windows and two numbers each."""
    monkeypatch.setattr(json_file, "WINDOW", 1 << 16)
    write(tmp_path / name, [{"id": index, "text": "word " * 200} for index in range(6000)])
    tracemalloc.start()
    found = RowFiles.open([tmp_path / name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 6000 and found.read(5999)["id"] == 5999
    assert peak < 1 << 20, peak
