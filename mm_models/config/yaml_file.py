"""YAML read without surprises: what looks like two things is refused, with the line, the key and what to write instead.

Mappings, lists, text, whole numbers, numbers, true/false and null; anchors and aliases. `1e-5` is a number. Refused: a key given
twice, tags (`!!int`), merge keys (`<<`), `on`/`off`/`yes`/`no`, `012`, `0x10`, `1_000`, `.inf`, a document that is not a mapping.
`dump` writes what `load` reads back as the same values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mm_models.errors import UserError

NULL = re.compile(r"~|null|Null|NULL|")
BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
AMBIGUOUS = (
    (re.compile(r"on|yes|y", re.I), "some YAML readers take it for true; write true, or quote it if it is text"),
    (re.compile(r"off|no|n", re.I), "some YAML readers take it for false; write false, or quote it if it is text"),
    (
        re.compile(r"[-+]?0[0-9_]+"),
        "it may be octal; write the number without a leading zero, or quote it if it is text",
    ),
    (re.compile(r"[-+]?0[xob][0-9a-f_]+", re.I), "write the number in decimal, or quote it if it is text"),
    (
        re.compile(r"[-+]?[0-9.][0-9_.]*_[0-9_.]*([e][-+]?[0-9]+)?", re.I),
        "write the number without underscores, or quote it if it is text",
    ),
    (re.compile(r"[-+]?\.(inf|nan)", re.I), "expected a finite number"),
)


class _Loader(yaml.SafeLoader):
    """The safe loader without types of its own: every plain scalar stays text, every tag is refused."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  the class attribute PyYAML reads

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if getattr(event, "tag", None):
            raise _Fault(f"tag {event.tag!r} is not supported; write the plain value", event.start_mark)
        return super().compose_node(parent, index)


class _Fault(Exception):
    def __init__(self, text: str, mark: Any):
        super().__init__(text)
        self.text, self.mark = text, mark


def load(path: str | Path) -> dict[str, Any]:
    """The mapping a YAML file holds; a missing or empty file, or one that is no mapping, is a `UserError`."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: a folder, expected a YAML file.")
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from error
    found = parse(text, str(path))
    if found is None:
        raise UserError(f"{path}: the file is empty, expected a mapping.")
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a mapping (key: value), got {_kind(found)}.")
    return found


def parse(text: str, where: str) -> Any:
    """The value a YAML text holds. `where` names it in errors."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        return None if node is None else _value(node, "", ())
    except _Fault as fault:
        raise UserError(f"{where}, line {fault.mark.line + 1}: {fault.text}.") from fault
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML{_place(error)}.") from error


def dump(value: Any) -> str:
    """`value` as YAML in its own order; text that would be read as something else is quoted."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _value(node: yaml.Node, key: str, above: tuple[yaml.Node, ...]) -> Any:
    if any(node is one for one in above):
        raise _Fault(f"{key or 'the document'} contains itself through an alias", node.start_mark)
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = _key(name_node, key)
            path = f"{key}.{name}" if key else name
            if name in found:
                raise _Fault(f"key {path!r} is given twice; keep one", name_node.start_mark)
            found[name] = _value(value_node, path, above)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, f"{key}[{place}]", above) for place, item in enumerate(node.value)]
    return node.value if node.style else _plain(node.value, key, node.start_mark)


def _key(node: yaml.Node, parent: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Fault(f"a key of {parent or 'the document'} is not a word", node.start_mark)
    if node.value == "<<" and node.style is None:
        raise _Fault("the merge key '<<' is not supported; write the keys out", node.start_mark)
    return node.value


def _plain(word: str, key: str, mark: Any) -> Any:
    """An unquoted scalar: null, boolean, number or text."""
    if NULL.fullmatch(word):
        return None
    if BOOLEAN.fullmatch(word):
        return word.lower() == "true"
    if WHOLE.fullmatch(word):
        return int(word)
    for pattern, advice in AMBIGUOUS:
        if pattern.fullmatch(word):
            raise _Fault(f"{key + ': ' if key else ''}got {word}; {advice}", mark)
    return float(word) if NUMBER.fullmatch(word) else word


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"only {value!r}"


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return (f", line {mark.line + 1} column {mark.column + 1}" if mark else "") + f": {problem}"


class _Dumper(yaml.SafeDumper):
    """The safe dumper that quotes what `_plain` would not read as text, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, word: str) -> yaml.Node:
        try:
            plain = word.isprintable() and isinstance(_plain(word, "", None), str)  # YAML folds odd line breaks
        except _Fault:
            plain = False
        return self.represent_scalar("tag:yaml.org,2002:str", word, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.text)
