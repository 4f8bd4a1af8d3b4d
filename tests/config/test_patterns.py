"""The pattern language: what each token stands for, what a plan may not say, and the words of each refusal."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_models.config.patterns import matcher, matches, resolve
from mm_models.errors import UserError

LAYERS = 46
NAMES = [
    "model",
    "model.visual",
    *(f"model.visual.blocks.{i}{tail}" for i in range(3) for tail in ("", ".mlp", ".mlp.up_proj")),
    "model.language_model",
    "model.language_model.embed_tokens",
    *(f"model.language_model.layers.{i}" for i in range(LAYERS)),
    *(f"model.language_model.layers.{i}.mlp" for i in range(LAYERS)),
    *(f"model.language_model.layers.{i}.mlp.experts" for i in range(1, LAYERS)),
    "lm_head",
]
"""A decoder whose first layer has no experts."""


def indices(pattern: str) -> list[int]:
    return [int(re.search(r"\d+", name)[0]) for name in resolve([pattern], NAMES, "plan")]


def test_each_token():
    layer = "model.language_model.layers."
    assert indices(layer + "{*}") == list(range(46))
    assert indices(layer + "{40-45}") == [40, 41, 42, 43, 44, 45]
    assert indices(layer + "{1,3}") == [1, 3]
    assert indices(layer + "{0, 7-9,45}") == [0, 7, 8, 9, 45]
    assert indices(layer + "{3}") == [3]
    assert indices("model.visual.blocks.{*}.mlp.up_proj") == [0, 1, 2]
    assert resolve(["*up_proj"], NAMES, "plan") == [f"model.visual.blocks.{i}.mlp.up_proj" for i in range(3)]
    assert resolve(["lm_head"], NAMES, "plan") == ["lm_head"]
    assert resolve([], NAMES, "plan") == []


def test_a_star_takes_dots_and_an_index_does_not():
    assert matches(["model.visual.*"], "model.visual.blocks.0.mlp") and not matches(["model.visual.*"], "model.visual")
    assert not matches(["model.visual.blocks.{*}"], "model.visual.blocks.0.mlp")
    assert not matches(["model.visual.blocks.{*}"], "model.visual.blocks.01")
    assert not matches(["a.{*}"], "a.x") and not matches(["a.{*}"], "a.") and not matches(["a.{*}"], "a.-1")


def test_everything_else_is_literal():
    """Dots, brackets and signs of regular expressions and of fnmatch stand for themselves."""
    for text in ("a.b", "a+b", "[ab]", "a?b", "(a|b)", "a$", "^a", "a\\d"):
        assert matches([text], text)
    assert not matches(["a.b"], "axb") and not matches(["a?b"], "axb") and not matches(["[ab]"], "a")
    assert not matches(["a"], "A") and not matches(["a"], "a\n")


def test_names_come_in_the_order_of_the_model():
    patterns = ["lm_head", "model.language_model", "model.visual"]
    assert resolve(patterns, NAMES, "plan") == ["model.visual", "model.language_model", "lm_head"]


def test_a_pattern_that_matches_45_of_46_layers_is_alive():
    assert indices("model.language_model.layers.{*}.mlp.experts") == list(range(1, 46))
    assert indices("model.language_model.layers.{0-45}.mlp.experts") == list(range(1, 46))


DEAD = {
    "model.language_model.layer.{*}": "'model.language_model.layers.{*}'",
    "model.language_models": "'model.language_model'",
    "lmhead": "'lm_head'",
    "model.visual.block.{0-2}": "'model.visual.blocks.{*}'",
    "language_model.layers.{*}": "'model.language_model.layers.{*}'",
    "zzz": "'model', 'lm_head'",
    "Model.visual": "'model.visual'",
}


@pytest.mark.parametrize("pattern", DEAD)
def test_a_dead_pattern_names_the_nearest_modules(pattern):
    """Also beside patterns that are alive: one dead line is enough."""
    with pytest.raises(UserError) as caught:
        resolve(["model.visual", pattern], NAMES, "parallel.fsdp_plan.apply_modules")
    text = str(caught.value)
    assert text.startswith(f"parallel.fsdp_plan.apply_modules: {pattern!r} matches nothing.") and DEAD[pattern] in text


def test_an_index_that_is_not_there_is_named():
    layer = "model.language_model.layers."
    for pattern, words in {
        layer + "{0-99}": "goes to index 99, the last one there is 45",
        layer + "{0,46}": "goes to index 46, the last one there is 45",
        layer + "{40-46}": "goes to index 46, the last one there is 45",
        layer + "{0,3}.mlp.experts": "index 0 of .* matches nothing",
        layer + "{99}": "matches nothing",
    }.items():
        with pytest.raises(UserError, match=words):
            resolve([pattern], NAMES, "plan")


def test_a_module_named_twice_names_both_patterns():
    with pytest.raises(UserError) as caught:
        resolve(["model.visual.blocks.{*}", "model.visual.blocks.{2}"], NAMES, "plan")
    text = str(caught.value)
    assert (
        "model.visual.blocks.2" in text and "'model.visual.blocks.{*}'" in text and "'model.visual.blocks.{2}'" in text
    )
    with pytest.raises(UserError, match="'lm_head' names lm_head, twice"):
        resolve(["lm_head", "lm_head"], NAMES, "plan")


MALFORMED = {
    "model.visual.blocks.{}": r"'\{}' is empty; write '\{\*}'",
    "a.{x}": r"got \{x}, expected",
    "a.{1-}": r"got \{1-}, expected",
    "a.{-1}": r"got \{-1}, expected",
    "a.{1..3}": r"got \{1\.\.3}, expected",
    "a.{1,}": r"got \{1,}, expected",
    "a.{5-3}": "runs backwards",
    "a.{0-99999999}": "longer than",
    "a.{*": "without its partner",
    "a.*}": "without its partner",
    "a.{{*}}": "without its partner",
    "": "empty pattern",
}


@pytest.mark.parametrize("pattern", MALFORMED)
def test_what_is_no_pattern(pattern):
    with pytest.raises(UserError, match=MALFORMED[pattern]):
        matcher(pattern)


PART = st.sampled_from(["model", "visual", "blocks", "0", "1", "12", "norm_1", "a+b"])
NAME = st.lists(PART, min_size=1, max_size=4).map(".".join)


@settings(max_examples=200, deadline=None)
@given(NAME, st.data())
def test_a_star_means_what_fnmatch_means_by_it(name, data):
    """Cut anywhere and put stars in: the same as fnmatch on every name, for patterns of letters, dots and stars."""
    cut = data.draw(st.integers(0, len(name)))
    pattern = name[:cut] + "*" + name[data.draw(st.integers(cut, len(name))) :]
    assert matches([pattern], name)
    other = data.draw(NAME)
    assert matches([pattern], other) == fnmatch.fnmatchcase(other, pattern)


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 60), min_size=1), st.sets(st.integers(0, 60), min_size=1), st.data())
def test_braces_are_sets_of_numbers(there, listed, data):
    """Any list, written as numbers and ranges in any order: the indices that are listed and there, in the model's order; refused
    exactly when an item has none or ends beyond the last."""
    items, rest = [], sorted(listed)
    while rest:
        run = 1
        while run < len(rest) and rest[run] == rest[0] + run and data.draw(st.booleans()):
            run += 1
        items.append((rest[0], rest[run - 1]))
        rest = rest[run:]
    items = data.draw(st.permutations(items))
    pattern = "m.{" + ",".join(f"{a}-{b}" if a != b else str(a) for a, b in items) + "}.w"
    names = [f"m.{i}.w" for i in sorted(there)]
    fine = all(b <= max(there) and there.intersection(range(a, b + 1)) for a, b in items)
    if fine:
        assert resolve([pattern], names, "plan") == [f"m.{i}.w" for i in sorted(there & listed)]
    else:
        with pytest.raises(UserError):
            resolve([pattern], names, "plan")


@settings(max_examples=100, deadline=None)
@given(st.lists(NAME, min_size=1, unique=True))
def test_every_name_stands_for_itself(names):
    assert resolve(names, names, "plan") == names
