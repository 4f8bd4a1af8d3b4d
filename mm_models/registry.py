"""The registry: tables of ids, each id a name of code that is imported only when it is used.

An entry is a plain string `"module:attribute"`, so that listing a table imports nothing. The built-in ids stand in the
catalogues below; another package adds its own by the entry-point group `mm_models.plugins`, or a user by `--plugin PATH`.
Either is a module that calls `table(name).add(id, "module:attribute")`.

Refused: an unknown table or id (with the nearest one), an id defined twice (both definitions named), a plugin that cannot
be imported (its own traceback is kept as the cause).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mm_models.errors import UserError, unknown_name

TABLES = (
    "vision_encoders",
    "vision_projectors",
    "text_decoders",
    "vit_layer_specs",
    "llm_layer_specs",
    "sections",
    "weight_maps",
    "converters",
    "positions",
    "models",
    "datasets",
    "templates",
    "collators",
    "ops",
)
"""Every table there is; a catalogue or a plugin cannot make another."""

CATALOGUES = ("specs.catalogue", "converters.catalogue", "mm_models.data.catalogue", "mm_models.ops.catalogue")
ENTRY_POINTS = "mm_models.plugins"
_loaded: dict[str, None] = {}


class Registry:
    """One table: id -> "module:attribute"."""

    def __init__(self, name: str):
        self.name = name
        self._targets: dict[str, str] = {}

    def add(self, id: str, target: str) -> None:
        """Enter `id`; `target` is "module:attribute". The same definition twice is harmless, another one is refused."""
        known = self._targets.get(id)
        if known is not None and known != target:
            raise UserError(
                f"{id!r} is defined twice in table {self.name!r}: {known} and {target}. Rename one of them."
            )
        if target.count(":") != 1:
            raise UserError(f"table {self.name!r}, id {id!r}: got target {target!r}, expected 'module:attribute'.")
        self._targets[id] = target

    def ids(self) -> list[str]:
        """All ids, sorted."""
        return sorted(self._targets)

    def target(self, id: str) -> str:
        """The "module:attribute" an id stands for, without importing it."""
        if id not in self._targets:
            raise unknown_name("id", id, self._targets, where=f"table {self.name!r}")
        return self._targets[id]

    def get(self, id: str) -> Any:
        """The object an id stands for; its module is imported now."""
        module, attribute = self.target(id).split(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, id: object) -> bool:
        return id in self._targets


@cache
def _tables() -> dict[str, Registry]:
    tables = {name: Registry(name) for name in TABLES}
    for catalogue in CATALOGUES:
        for name, entries in importlib.import_module(catalogue).CATALOGUE.items():
            for id, target in entries.items():
                tables[name].add(id, target)
    return tables


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise UserError(f"plugin {point.name!r} ({point.value}) cannot be imported: {error!r}") from error


def table(name: str) -> Registry:
    """The table called `name`, with built-in and installed plugin entries."""
    tables = _tables()
    if name not in tables:
        raise unknown_name("registry table", name, TABLES)
    _load_entry_points()
    return tables[name]


def load_plugins(plugins: Iterable[str]) -> list[ModuleType]:
    """Import each plugin: a dotted module name, or the path of a .py file or of a package folder."""
    modules = []
    for plugin in plugins:
        modules.append(_load_path(Path(plugin)) if _is_path(plugin) else _load_module(plugin))
        _loaded[plugin] = None
    return modules


def loaded_plugins() -> list[str]:
    """What `load_plugins` has loaded so far, in order: a process started by this one needs the same."""
    return list(_loaded)


def _is_path(plugin: str) -> bool:
    return plugin.endswith(".py") or "/" in plugin or Path(plugin).is_dir()


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(
            f"plugin {name!r} cannot be imported: {error!r}. Give a module name or the path of a .py file."
        ) from error


def _load_path(path: Path) -> ModuleType:
    file = path / "__init__.py" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"plugin {str(path)!r}: no such file. Give the path of a .py file or of a package folder.")
    name = path.stem if path.is_file() else path.resolve().name
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(path)] if path.is_dir() else None
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its entries "name:attribute" resolve
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"plugin {str(path)!r} cannot be imported: {error!r}") from error
    return module
