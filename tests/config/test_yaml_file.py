"""YAML: what is read as what, what is refused with line and key, and that `dump` writes what `load` reads back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_models.config.yaml_file import dump, load, parse
from mm_models.errors import UserError

SCALARS = {
    "1e-5": 1e-5,
    "1.0e-5": 1e-5,
    "1E-5": 1e-5,
    "1e-05": 1e-5,
    ".00001": 1e-5,
    "1e5": 1e5,
    "+1.5": 1.5,
    "1.": 1.0,
    "12": 12,
    "-3": -3,
    "0": 0,
    "0.5": 0.5,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    "'1e-5'": "1e-5",
    '"true"': "true",
    "'on'": "on",
    "'012'": "012",
    "auto": "auto",
    "1e": "1e",
    "1:30": "1:30",
    "2026-08-29": "2026-08-29",
    "./a b/c-1_0": "./a b/c-1_0",
    "model.visual.blocks.{*}": "model.visual.blocks.{*}",
    "v1_0": "v1_0",
    "norm": "norm",
}


@pytest.mark.parametrize("word", SCALARS)
def test_a_scalar_has_one_meaning(word):
    """Numbers with an exponent are numbers; quoted words are text; nothing becomes a date or a base-60 number."""
    got = parse(f"a: {word}", "f")["a"]
    assert got == SCALARS[word] and type(got) is type(SCALARS[word])


REFUSED = {
    "on": "write true, or quote it",
    "Off": "write false, or quote it",
    "YES": "write true",
    "n": "write false",
    "012": "without a leading zero",
    "-07": "without a leading zero",
    "0x10": "in decimal",
    "0o17": "in decimal",
    "1_000": "without underscores",
    "1_0.5": "without underscores",
    ".inf": "finite",
    "-.INF": "finite",
    ".nan": "finite",
    "!!int 3": "tag",
    "!!str on": "tag",
    "!!python/object/apply:os.system [ls]": "tag",
    "!local 3": "tag",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_readers_disagree_about_is_refused(word):
    """File, line, key and what to write instead; in lists too."""
    with pytest.raises(UserError) as caught:
        parse(f"b: 1\na:\n  - {word}\n", "some.yaml")
    assert "some.yaml, line 3" in str(caught.value) and REFUSED[word] in str(caught.value), caught.value
    if "tag" not in REFUSED[word]:
        assert "a[0]" in str(caught.value)


def test_a_key_twice_is_refused_at_any_depth():
    for text in ("a: 1\na: 1\n", "x:\n  a: 1\n  b: 2\n  a: 3\n", "x: [{a: 1, a: 2}]"):
        with pytest.raises(UserError, match=r"key '.*a' is given twice"):
            parse(text, "f")
    assert parse("a: {k: 1}\nb: {k: 1}", "f") == {"a": {"k": 1}, "b": {"k": 1}}


def test_anchors_and_aliases():
    """One value in two places; a value inside itself and merge keys are refused."""
    assert parse("a: &x ./p\nb: *x\nc: [*x, *x]", "f") == {"a": "./p", "b": "./p", "c": ["./p", "./p"]}
    assert parse("a: &x {k: 1}\nb: *x", "f") == {"a": {"k": 1}, "b": {"k": 1}}
    with pytest.raises(UserError, match="undefined alias"):
        parse("a: *x", "f")
    with pytest.raises(UserError, match="contains itself"):
        parse("a: &x [1, *x]", "f")
    with pytest.raises(UserError, match="merge key"):
        parse("a: &x {k: 1}\nb:\n  <<: *x\n", "f")


def test_a_file_that_is_no_mapping(tmp_path):
    """Missing, a folder, empty, comments alone, a list, a word, bad syntax, another encoding: each says what it is."""
    cases = {
        "empty": ("", "empty"),
        "comment": ("# nothing\n", "empty"),
        "null": ("~\n", "empty"),
        "list": ("- a\n- b\n", "expected a mapping .*, got a list"),
        "word": ("hello\n", "expected a mapping .*, got only 'hello'"),
        "syntax": ("a: [1\nb: 2\n", r"not valid YAML, line \d"),
        "tab": ("a:\n\tb: 1\n", "not valid YAML, line 2"),
        "two": ("a: 1\n---\nb: 2\n", "not valid YAML.*expected a single document|but found another document"),
        "missing": (None, "no such file"),
    }
    for name, (text, words) in cases.items():
        path = tmp_path / f"{name}.yaml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=words) as caught:
            load(path)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="a folder"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("a: ü".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


WORDS = st.one_of(st.sampled_from([*SCALARS, *REFUSED, "'", '"', "a: b", "# c", "- x", " x ", "a\nb"]), st.text())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcde"), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["lr", "x.y", "name"]), VALUES, min_size=1))
def test_what_is_dumped_is_read_back(value):
    """Any value, any text: the same value, of the same type."""
    back = parse(dump(value), "f")
    assert back == value and repr(back) == repr(value)


def test_a_dumped_float_is_exact():
    for number in (1e-5, 1e-8, 0.1, 1e22, 5e-324, math.pi, -0.0, 1.0):
        assert repr(parse(dump({"a": number}), "f")["a"]) == repr(number)
