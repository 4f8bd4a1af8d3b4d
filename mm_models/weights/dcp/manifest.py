"""The manifest of a DCP folder: the model, the expert layout and prefix of its keys, and where every item's bytes lie.

`.metadata` says what stock DCP needs; the manifest says what it does not: so a folder of ours is never guessed at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_models.config.model import ModelConfig
from mm_models.config.strict import load_json, validate
from mm_models.errors import UserError
from mm_models.weights import mmfolder
from mm_models.weights.boxes import Shape, volume
from mm_models.weights.dtypes import itemsize
from mm_models.weights.manifest import versions
from mm_models.weights.rules import FILE_LAYOUTS

FORMAT, VERSION = "mm-models dcp", 1


@dataclass(frozen=True, kw_only=True)
class ItemRecord:
    """One item of a `.distcp` file: the box `offsets`/`sizes` of tensor `key`, whose whole shape is `shape`.

    `start` and `length` are the item's bytes in `file`, `offset` is where its elements begin. Plain data: it can be gathered.
    """

    key: str
    file: str
    start: int
    length: int
    offset: int
    dtype: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    crc32: int | None

    @property
    def nbytes(self) -> int:
        return volume(self.sizes) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class DcpManifest:
    """`iteration` None is a release. `source` says where the weights came from; `training` is what a trainer adds (plain data)."""

    iteration: int | None
    model: ModelConfig
    expert_layout: str
    dcp_prefix: str
    items: tuple[ItemRecord, ...]
    source: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """As JSON, one item a line."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": mmfolder.RELEASE if self.iteration is None else self.iteration,
            "versions": versions(),
            "source": dict(self.source),
            "model": self.model.model_dump(mode="json", exclude_none=True),
            "expert_layout": self.expert_layout,
            "dcp_prefix": self.dcp_prefix,
            "training": dict(self.training),
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        rows = ",\n".join(json.dumps({name: getattr(item, name) for name in _FIELDS}) for item in self.items)
        return "{\n" + ",\n".join(lines) + f',\n"items": [\n{rows}\n]\n' + "}\n"


_FIELDS = tuple(ItemRecord.__dataclass_fields__)


def write(folder: Path, manifest: DcpManifest) -> None:
    """Write it durably."""
    with (folder / mmfolder.MANIFEST).open("w") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> DcpManifest:
    """Refused: another format or version, an unknown expert layout, damage."""
    data = load_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise UserError(f"{path}: its format is {found!r}, expected {FORMAT!r} (a checkpoint of the FSDP2 target).")
    if data.get("version") != VERSION:
        raise UserError(
            f"{path}: manifest version {data.get('version')!r}, this tool reads {VERSION}. Use the version that wrote it."
        )
    if data.get("expert_layout") not in FILE_LAYOUTS:
        raise UserError(f"{path}: expert layout {data.get('expert_layout')!r}. Known: {', '.join(FILE_LAYOUTS)}.")
    try:
        return DcpManifest(
            iteration=None if data["iteration"] == mmfolder.RELEASE else int(data["iteration"]),
            model=validate(ModelConfig, data["model"], f"{path} model"),
            expert_layout=data["expert_layout"],
            dcp_prefix=data["dcp_prefix"],
            items=tuple(_item(row) for row in data["items"]),
            source=data["source"],
            training=data["training"],
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged manifest ({error!r}). Restore it, or convert again.") from error


def _item(row: Mapping[str, Any]) -> ItemRecord:
    return ItemRecord(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})


def by_key(items: Sequence[ItemRecord]) -> dict[str, list[ItemRecord]]:
    found: dict[str, list[ItemRecord]] = {}
    for item in items:
        found.setdefault(item.key, []).append(item)
    return found
