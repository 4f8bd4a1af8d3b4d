"""Closed schemas and strict files: a key that nobody reads is an error, with the nearest name that exists.

`StrictModel` forbids unknown keys and lax conversions ("true" is not a boolean, null is not a number). `load_json` refuses
a key given twice. `validate` turns pydantic's report into one `UserError` that names file, key, value and expectation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from mm_models.errors import UserError, nearest


class StrictModel(BaseModel):
    """Base of every configuration schema: closed, strict, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


Model = TypeVar("Model", bound=BaseModel)

UNION_TAG = re.compile(r"(constrained-)?(str|int|float)|bool|\w+\[.*\]")
"""How pydantic names the member of a union in the place of a fault: no key of the user's."""


def load_json(path: str | Path) -> Any:
    """Parse a JSON file; a missing file, bad syntax or a key given twice is a `UserError` with path and place."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise UserError(f"{path}: key {key!r} is given twice; keep one.")
            result[key] = value
        return result

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON, line {error.lineno} column {error.colno}: {error.msg}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from error


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings that is not a mapping itself."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def validate(schema: type[Model], data: Any, where: str) -> Model:
    """`data` as a `schema`; every fault in one `UserError`. `where` names the file or flag group."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = [_describe(schema, fault, data) for fault in error.errors()]
        raise UserError(f"{where}: " + "; ".join(lines) + ".") from error


def _describe(schema: type[BaseModel], fault: dict[str, Any], data: Any) -> str:
    place = ".".join(str(part) for part in fault["loc"] if not UNION_TAG.fullmatch(str(part))) or "the document"
    if fault["type"] != "extra_forbidden":
        whole = fault["type"] == "missing" or (fault["type"] == "value_error" and isinstance(fault["input"], dict))
        got = "" if whole else f", got {fault['input']!r}"
        return f"{place}: {fault['msg'].removeprefix('Value error, ')}{got}"
    return unknown_key(schema, tuple(fault["loc"]), data)


def check_key(schema: type[BaseModel], key: str, where: str) -> None:
    """Refuse a dotted key that `schema` does not have."""
    loc = tuple(key.split("."))
    for depth in range(len(loc)):
        parent = schema if depth == 0 else _schema_at(schema, loc[:depth])
        if parent is None or loc[depth] not in parent.model_fields:
            raise UserError(f"{where}: {unknown_key(schema, loc[: depth + 1])}.")


def unknown_key(schema: type[BaseModel], loc: tuple, data: Any = None) -> str:
    """Words for a key that is not in `schema`: where it belongs, or the nearest one and all that stand there.

    `data` is the whole document, where there is one: a section may have a schema of its own by what it holds.
    """
    parent = _schema_at(schema, loc[:-1], data)
    fields = list(parent.model_fields) if parent else []
    place, got = ".".join(map(str, loc)), str(loc[-1])
    text = f"unknown key {place!r}"
    close = nearest(got, fields)
    elsewhere = [
        found for found in dotted_keys(schema, data=data) if found.rsplit(".", 1)[-1] == got and found != place
    ]
    if elsewhere:
        return text + f"; the key {got!r} belongs at {' or '.join(repr(path) for path in elsewhere)}"
    known = f" Known here: {', '.join(fields)}" if fields else " It has no keys inside"
    return text + (f", did you mean {close!r}?" if close else ".") + known


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Schema classes inside an annotation such as `Section | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def _schema_at(schema: type[BaseModel], loc: tuple, data: Any = None) -> type[BaseModel] | None:
    for key in loc:
        if not isinstance(key, str) or key not in schema.model_fields:
            continue  # an index into a list, or pydantic's tag of a union member
        inner = models_in(schema.model_fields[key].annotation)
        if not inner:
            return None
        data = data.get(key) if isinstance(data, Mapping) else None
        schema = _schema_for(inner[0], data)
    return schema


def dotted_keys(schema: type[BaseModel], prefix: str = "", data: Any = None) -> list[str]:
    """Every dotted key of a schema, for the document `data` where there is one."""
    found = []
    for name, field in schema.model_fields.items():
        found.append(prefix + name)
        below = data.get(name) if isinstance(data, Mapping) else None
        for inner in models_in(field.annotation):
            found += dotted_keys(_schema_for(inner, below), f"{prefix}{name}.", below)
    return found


def _schema_for(schema: type[BaseModel], data: Any) -> type[BaseModel]:
    """The schema of a section: its own by what it holds, where it chooses one."""
    return schema.schema_of(data) if hasattr(schema, "schema_of") else schema
