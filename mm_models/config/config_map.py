"""Config maps: how the fields of a Hugging Face config.json and of model.json say the same thing, both ways.

One `ConfigMap` per section of a family, written as data in `converters/<family>/`. A Hugging Face field may have several spellings
(`rope_parameters.rope_theta` since transformers 5, `rope_theta` before); an absent one means the class default of
transformers, stated here because no config object is built. A dotted name is a path inside the map's section of
config.json; a leading `/` starts at the root.

Refused: spellings that disagree with each other, a value the component cannot compute (`Required`), and, in
`disagreements`, a model.json that says something else than config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mm_models.errors import UserError

_ABSENT = object()


@dataclass(frozen=True)
class Field:
    """`mm` in model.json is `hf` in config.json: one path, or several spellings, the newest first.

    `default` is what an absent field means: a value, or a function of the model.json fields found before it; `null` names the
    model.json field whose value an explicit null means. `negate` turns a boolean round (tied / untied). With `any_true` the
    spellings are flags of which one is enough. With `scale` config.json holds a multiple of that model.json field.
    `compared` False: nothing reads the field, so a model.json may say something else.
    """

    mm: str
    hf: str | tuple[str, ...]
    default: Any
    negate: bool = False
    any_true: bool = False
    null: str | None = None
    scale: str | None = None
    compared: bool = True

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    def to_mm(self, value: Any, found: Mapping[str, Any]) -> Any:
        """A value of config.json in the terms of model.json."""
        if self.negate:
            return not value
        return value * found[self.scale] if self.scale else value

    def to_hf(self, value: Any, section: Mapping[str, Any]) -> Any:
        """The inverse of `to_mm`."""
        if self.negate:
            return not value
        if self.scale is None:
            return value
        ratio, rest = divmod(value, section[self.scale])
        if rest:
            raise UserError(
                f"{self.mm} {value} is no multiple of {self.scale} {section[self.scale]}, as {self.hf} needs."
            )
        return ratio


@dataclass(frozen=True)
class Fixed:
    """A model.json field without one in config.json: the same in every model, or a function of the fields found before it."""

    mm: str
    value: Any

    def read(self, found: Mapping[str, Any]) -> Any:
        return self.value(found) if callable(self.value) else self.value


@dataclass(frozen=True)
class Derived:
    """A model.json field computed from several of config.json's, `hf`: path -> what an absent one means."""

    mm: str
    hf: Mapping[str, Any]
    compute: Callable[..., Any]

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(self.hf)


@dataclass(frozen=True)
class Required:
    """A config.json field without a counterpart, which must have one of `values` (or be absent): the component knows no other.

    With `each` it is a list of such values. Several spellings may stand side by side.
    """

    hf: str | tuple[str, ...]
    values: tuple[Any, ...]
    each: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    def allows(self, value: Any) -> bool:
        if self.each:
            return isinstance(value, list) and all(one in self.values for one in value)
        return value in self.values


@dataclass(frozen=True, kw_only=True)
class ConfigMap:
    """The fields of one section, as one family spells them. `hf_section` is the section of config.json its names start from."""

    model_id: str
    section: str
    hf_section: str
    fields: tuple[Field | Fixed | Derived | Required, ...]

    def from_hf(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        """The section of model.json that a config.json describes, but for its `model_id`."""
        found: dict[str, Any] = {}
        for field in self.fields:
            if isinstance(field, Fixed):
                found[field.mm] = field.read(found)
            elif isinstance(field, Required):
                self._require(field, config, where)
            elif isinstance(field, Derived):
                values = (_take(config, self._path(name)) for name in field.hf)
                found[field.mm] = field.compute(
                    *(default if value is _ABSENT else value for value, default in zip(values, field.hf.values()))
                )
            else:
                found[field.mm] = self._value(field, config, found, where)
        return found

    def to_hf(self, section: Mapping[str, Any], config: dict[str, Any]) -> None:
        """Write a model.json section into `config`, in the newest spelling of each field; what is null there stays unsaid."""
        for field in self.fields:
            if isinstance(field, (Fixed, Derived)) or (isinstance(field, Required) and field.each):
                continue
            if isinstance(field, Required):
                value = field.values[0]
            elif section[field.mm] is None:
                continue
            else:
                value = field.to_hf(section[field.mm], section)
            _put(config, self._path(field.spellings[0]), value)

    def disagreements(
        self, section: Mapping[str, Any], config: Mapping[str, Any], where: str = "config.json"
    ) -> list[str]:
        """Every field where the model.json `section` and `config` differ, in words."""
        wanted, faults = self.from_hf(config, where), []
        prefix = f"{self.section}." if self.section else ""
        for field in self.fields:
            if isinstance(field, Required) or not getattr(field, "compared", True) or field.mm not in section:
                continue
            have, want = section[field.mm], wanted[field.mm]
            if have != want:
                said = f" ({'.'.join(self._path(field.spellings[0]))})" if not isinstance(field, Fixed) else ""
                faults.append(f"{prefix}{field.mm} is {have!r}, {where}{said} means {want!r}")
        return faults

    def differences(
        self, one: Mapping[str, Any], other: Mapping[str, Any], where: str = "config.json"
    ) -> list[tuple[str, Any, Any]]:
        """(key of the section, value in `one`, value in `other`) of every field that `one` says there and `other` means otherwise."""
        there, found = self.from_hf(other, where), []
        for field in self.fields:
            if not isinstance(field, Field) or not field.compared:
                continue
            paths = [path for path in map(self._path, field.spellings) if path[0] == self.hf_section]
            said = [path for path in paths if _take(one, path) is not _ABSENT]
            if said and (value := self._value(field, one, there, where)) != there[field.mm]:
                found.append((".".join(said[0][1:]), value, there[field.mm]))
        return found

    def known_paths(self) -> set[tuple[str, ...]]:
        """The config.json paths this map reads, for telling the user which keys nobody reads."""
        return {self._path(name) for field in self.fields if not isinstance(field, Fixed) for name in field.spellings}

    def _path(self, name: str) -> tuple[str, ...]:
        if name.startswith("/"):
            return tuple(name[1:].split("."))
        return (*([self.hf_section] if self.hf_section else []), *name.split("."))

    def _require(self, field: Required, config: Mapping[str, Any], where: str) -> None:
        for path in map(self._path, field.spellings):
            value = _take(config, path)
            if value is not _ABSENT and not field.allows(value):
                raise UserError(
                    f"{where}: {'.'.join(path)} is {value!r}; {self.model_id} knows only {_list(field.values)}."
                )

    def _value(self, field: Field, config: Mapping[str, Any], found: Mapping[str, Any], where: str) -> Any:
        """What config.json says of `field`, in the terms of model.json."""
        there = [
            (".".join(path), value)
            for path in map(self._path, field.spellings)
            if (value := _take(config, path)) is not _ABSENT
        ]
        if not there:
            if field.null is not None and any(_is_null(config, self._path(name)) for name in field.spellings):
                return found[field.null]
            default = field.default(found) if callable(field.default) else field.default
            return field.to_mm(default, found) if field.scale else default
        if field.any_true:
            return field.to_mm(any(value for _, value in there), found)
        others = [f"{path} = {value!r}" for path, value in there[1:] if value != there[0][1]]
        if others:
            raise UserError(
                f"{where}: {there[0][0]} = {there[0][1]!r} disagrees with {', '.join(others)}. They are spellings of one field; keep one."
            )
        return field.to_mm(there[0][1], found)


def _take(config: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(config, Mapping) or config.get(key) is None:
            return _ABSENT
        config = config[key]
    return config


def _is_null(config: Any, path: tuple[str, ...]) -> bool:
    """Whether the key is there and says null."""
    for key in path[:-1]:
        config = config.get(key) if isinstance(config, Mapping) else None
    return isinstance(config, Mapping) and path[-1] in config and config[path[-1]] is None


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def _list(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))
