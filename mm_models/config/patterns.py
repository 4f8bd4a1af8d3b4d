"""The pattern language of every plan: which modules or parameters a line of the configuration means.

    {*}      one index                  model.language_model.layers.{*}
    {a-b}    an index from a to b       model.language_model.layers.{40-45}
    {a,b}    one of these, ranges too   model.visual.blocks.{0,2,5-7}
    *        any characters, dots too   model.visual.*
    .        and everything else stand for themselves

A pattern stands for a whole name. Refused: `{}` and other braces, a pattern that matches nothing (with the nearest names), an
index beyond the last one there is, a name that two patterns of one plan match.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache

from mm_models.errors import UserError

TOKEN = re.compile(r"\{[^{}]*\}|\*|[^*{}]+|[{}]")
ITEM = re.compile(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*")
ANY = r"(0|[1-9]\d*)"
MOST = 10_000
"""Indices one brace may list."""


@cache
def matcher(pattern: str) -> re.Pattern[str]:
    """The regular expression of `pattern`, for `fullmatch`; one group for each brace, in order."""
    if not pattern:
        raise UserError("an empty pattern matches nothing; drop it.")
    return re.compile("".join(_token(token, pattern) for token in TOKEN.findall(pattern)))


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether any of `patterns` stands for `name`."""
    return any(_fits(pattern, name) for pattern in patterns)


def resolve(patterns: Sequence[str], names: Iterable[str], where: str) -> list[str]:
    """The `names` that `patterns` stand for, in the order of `names`. `where` is the key the patterns come from."""
    names = list(names)
    by: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name in names if _fits(pattern, name)]
        if not found:
            raise UserError(f"{where}: {pattern!r} matches nothing.{_hint(pattern, names)}")
        _check_ends(pattern, found, names, where)
        for name in found:
            if name in by:
                again = "twice" if by[name] == pattern else f"and so does {by[name]!r}"
                raise UserError(f"{where}: {pattern!r} names {name}, {again}. Name each module once.")
            by[name] = pattern
    return [name for name in names if name in by]


def _fits(pattern: str, name: str) -> bool:
    return matcher(pattern).fullmatch(name) is not None


def _token(token: str, pattern: str) -> str:
    if token == "*":
        return ".*"
    if token == "{*}":
        return ANY
    if token[0] not in "{}":
        return re.escape(token)
    numbers = {number for first, last in _items(token, pattern) for number in range(first, last + 1)}
    return "(" + "|".join(map(str, sorted(numbers))) + ")"


def _items(brace: str, pattern: str) -> list[tuple[int, int]]:
    """First and last index of each item of a brace."""
    if brace == "{}":
        raise UserError(f"pattern {pattern!r}: '{{}}' is empty; write '{{*}}' for any index.")
    if len(brace) < 2:
        raise UserError(f"pattern {pattern!r}: a brace without its partner.")
    found = []
    for item in brace[1:-1].split(","):
        if (match := ITEM.fullmatch(item)) is None:
            raise UserError(
                f"pattern {pattern!r}: got {brace}, expected {{*}}, a range such as {{0-3}} or a list such as {{0,2}}."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST:
            raise UserError(f"pattern {pattern!r}: range {first}-{last} runs backwards or is longer than {MOST}.")
        found.append((first, last))
    return found


def _check_ends(pattern: str, found: Sequence[str], names: Sequence[str], where: str) -> None:
    """Each item of each brace must match, and no range may go beyond the last index there is."""
    tokens = TOKEN.findall(pattern)
    braces = [place for place, token in enumerate(tokens) if token[0] == "{"]
    for group, place in enumerate(braces, 1):
        if tokens[place] == "{*}":
            continue
        opened = matcher("".join([*tokens[:place], "{*}", *tokens[place + 1 :]]))
        last = max(int(match[group]) for name in names if (match := opened.fullmatch(name)))
        used = {int(matcher(pattern).fullmatch(name)[group]) for name in found}
        for low, high in _items(tokens[place], pattern):
            if high > last:
                raise UserError(f"{where}: {pattern!r} goes to index {high}, the last one there is {last}.")
            if not used.intersection(range(low, high + 1)):
                raise UserError(f"{where}: index {low} of {pattern!r} matches nothing.{_hint(pattern, names)}")


def _hint(pattern: str, names: Sequence[str]) -> str:
    """The nearest names, indices written as {*}."""
    shapes = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "{*}", name) for name in names if name))
    close = difflib.get_close_matches(re.sub(r"\{[^{}]*\}", "{*}", pattern), shapes, n=3, cutoff=0.5)
    if not close:
        close = [shape for shape in shapes if "." not in shape][:6]
    return f" Nearest: {', '.join(map(repr, close))}." if close else " There are no names."
