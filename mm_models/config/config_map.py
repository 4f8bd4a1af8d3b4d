"""Config maps: how the fields of a Hugging Face config.json and of model.json say the same thing, both ways.

One `ConfigMap` per `model_id`, written as data in `converters/<family>/`. A Hugging Face field may have several spellings
(`rope_parameters.rope_theta` since transformers 5, `rope_theta` before); an absent one means the class default of
transformers, stated here because no config object is built. A dotted name is a path inside the map's section of
config.json; a leading `/` starts at the root.

Refused: spellings that disagree with each other, a value the component cannot compute (`Required`), and, in
`disagreements`, a model.json that says something else than config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_models.errors import UserError

_ABSENT = object()


@dataclass(frozen=True)
class Field:
    """`mm` in model.json is `hf` in config.json: one path, or several spellings, the newest first.

    `default` is what an absent field means: a value, or a function of the model.json fields found before it.
    `negate` turns a boolean round (tied / untied). With `any_true` the spellings are flags of which one is enough.
    """

    mm: str
    hf: str | tuple[str, ...]
    default: Any
    negate: bool = False
    any_true: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf


@dataclass(frozen=True)
class Fixed:
    """A model.json field that every model of this `model_id` has, with no field in config.json."""

    mm: str
    value: Any


@dataclass(frozen=True)
class Required:
    """A config.json field without a counterpart, which must have one of `values` (or be absent): the component knows no other."""

    hf: str | tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf


@dataclass(frozen=True, kw_only=True)
class ConfigMap:
    """The fields of one `model_id`. `hf_section` is the section of config.json its names start from; "" is the root."""

    model_id: str
    section: str
    hf_section: str
    fields: tuple[Field | Fixed | Required, ...]

    def from_hf(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        """The section of model.json that a config.json describes."""
        found: dict[str, Any] = {} if self.section == "" else {"model_id": self.model_id}
        for field in self.fields:
            if isinstance(field, Fixed):
                found[field.mm] = field.value
            elif isinstance(field, Required):
                path, value = self._read(field, config, where)
                if value is not _ABSENT and value not in field.values:
                    raise UserError(f"{where}: {path} is {value!r}; {self.model_id} knows only {_list(field.values)}.")
            else:
                _, value = self._read(field, config, where)
                if value is _ABSENT:
                    value = field.default(found) if callable(field.default) else field.default
                else:
                    value = (not value) if field.negate else value
                found[field.mm] = value
        return found

    def to_hf(self, section: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Write a model.json section into `config`, in the newest spelling of each field."""
        for field in self.fields:
            if isinstance(field, Fixed):
                continue
            value = field.values[0] if isinstance(field, Required) else section[field.mm]
            if isinstance(field, Field) and field.negate:
                value = not value
            _put(config, self._path(field.spellings[0]), value)

    def disagreements(
        self, section: Mapping[str, Any], config: Mapping[str, Any], where: str = "config.json"
    ) -> list[str]:
        """Every field where the model.json `section` and `config` differ, in words."""
        wanted, faults = self.from_hf(config, where), []
        for field in self.fields:
            if isinstance(field, Field) and section.get(field.mm) != wanted[field.mm]:
                prefix = f"{self.section}." if self.section else ""
                faults.append(
                    f"{prefix}{field.mm} is {section.get(field.mm)!r}, {where} ({'.'.join(self._path(field.spellings[0]))}) "
                    f"means {wanted[field.mm]!r}"
                )
        return faults

    def known_paths(self) -> set[tuple[str, ...]]:
        """The config.json paths this map reads, for telling the user which keys nobody reads."""
        return {self._path(name) for field in self.fields if not isinstance(field, Fixed) for name in field.spellings}

    def _path(self, name: str) -> tuple[str, ...]:
        if name.startswith("/"):
            return tuple(name[1:].split("."))
        return (*([self.hf_section] if self.hf_section else []), *name.split("."))

    def _read(self, field: Field | Required, config: Mapping[str, Any], where: str) -> tuple[str, Any]:
        """(path, value) of the first spelling that is there; null counts as absent."""
        found = [
            (".".join(path), value)
            for path in map(self._path, field.spellings)
            if (value := _take(config, path)) is not _ABSENT
        ]
        if not found:
            return "", _ABSENT
        if isinstance(field, Field) and field.any_true:
            return found[0][0], any(value for _, value in found)
        others = [f"{path} = {value!r}" for path, value in found[1:] if value != found[0][1]]
        if others:
            raise UserError(
                f"{where}: {found[0][0]} = {found[0][1]!r} disagrees with {', '.join(others)}. They are spellings of one field; keep one."
            )
        return found[0]


def _take(config: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(config, Mapping) or config.get(key) is None:
            return _ABSENT
        config = config[key]
    return config


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def _list(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))
