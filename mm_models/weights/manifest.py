"""The manifest: what a checkpoint is, and where every tensor of it lies, with its CRC-32.

It makes a checkpoint readable without unpickling anything: model, layout, stage splits and expert layout are stated, and
each tensor has its file, byte offset, data type, shape and CRC. `open_checkpoint` reads it and checks that every file it
names is there at full length; `verify` reads the bytes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from mm_models.config.model import ModelConfig
from mm_models.config.strict import load_json, validate
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout, StageSplit
from mm_models.weights import mmfolder
from mm_models.weights.boxes import Shape, volume
from mm_models.weights.dtypes import itemsize

FORMAT, VERSION = "mm-models checkpoint", 1
DCP_METADATA = ".metadata"
"""What a checkpoint of the other target has in place of rank folders."""
EXPERT_LAYOUT = "stacked_hf"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of one shard. `name` is global, `key` the file's own; `file` is relative to the checkpoint folder."""

    name: str
    file: str
    container: str
    key: str
    dtype: str
    shape: Shape
    offset: int
    crc32: int | None

    @property
    def nbytes(self) -> int:
        return volume(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One part ("master", "exp_avg", "exp_avg_sq") of the optimizer state of parameter `name`: the elements `range` of its
    local tensor, whose shape is `shape`. `file` is relative to the checkpoint folder."""

    name: str
    part: str
    file: str
    dtype: str
    shape: Shape
    range: tuple[int, int]
    offset: int
    crc32: int | None

    @property
    def nbytes(self) -> int:
        return (self.range[1] - self.range[0]) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`iteration` None is a release. `source` says where the weights came from; `dtype` is what most of their bytes are."""

    iteration: int | None
    model: ModelConfig
    layout: ParallelLayout
    split: ModelSplit
    tensors: tuple[Entry, ...]
    optimizer: tuple[Moment, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        totals: dict[str, int] = {}
        for entry in self.tensors:
            totals[entry.dtype] = totals.get(entry.dtype, 0) + entry.nbytes
        return max(totals, key=totals.get)

    def dump(self) -> str:
        """As JSON, one tensor a line."""
        layout = {name: getattr(self.layout, name) for name in ("tp", "pp", "vpp", "ep", "etp")}
        splits = {
            name: split.nested() for name in ("vision", "text") if (split := getattr(self.split, name)) is not None
        }
        head = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": mmfolder.RELEASE if self.iteration is None else self.iteration,
            "versions": versions(),
            "source": dict(self.source),
            "model": self.model.model_dump(mode="json", exclude_none=True),
            "layout": layout,
            "flags": f"{self.layout.flags()} "
            + " ".join(f"--{_FLAG[name]} '{json.dumps(rows)}'" for name, rows in splits.items()),
            "splits": splits,
            "expert_layout": EXPERT_LAYOUT,
            "dtype": self.dtype,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for name in ("tensors", "optimizer"):
            rows = ",\n".join(json.dumps(asdict(entry)) for entry in getattr(self, name))
            lines.append(f"{json.dumps(name)}: [\n{rows}\n]")
        return "{\n" + ",\n".join(lines) + "\n}\n"


_FLAG = {"vision": "vit-pp-layers", "text": "llm-pp-layers"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint folder and its manifest. `repeated`: a folder of the field that holds the dense tensors again
    in every expert rank's folder."""

    folder: Path
    manifest: Manifest
    repeated: bool = False


def versions() -> dict[str, str]:
    """Installed versions of what wrote the checkpoint."""
    found = {}
    for name in ("mm-models", "torch", "megatron-core", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into a temporary checkpoint folder, durably: the last file before `mmfolder.publish`."""
    with (folder / mmfolder.MANIFEST).open("w") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    data = load_json(path)
    if (path.parent / DCP_METADATA).is_file():
        raise UserError(
            f"{path.parent}: a DCP checkpoint, not one of the Megatron target. mm-convert dcp_to_hf and dcp_to_mm read it."
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(
            f"{path}: not a manifest of this tool (format {data.get('format') if isinstance(data, dict) else None!r})."
        )
    if data.get("version") != VERSION:
        raise UserError(
            f"{path}: manifest version {data.get('version')!r}, this tool reads {VERSION}. Convert with the version that wrote it."
        )
    if data.get("expert_layout") != EXPERT_LAYOUT:
        raise UserError(f"{path}: expert layout {data.get('expert_layout')!r}, this tool reads {EXPERT_LAYOUT!r}.")
    try:
        splits = {
            name: StageSplit(tuple(map(tuple, data["splits"][name]))) if name in data["splits"] else None
            for name in ("vision", "text")
        }
        return Manifest(
            iteration=None if data["iteration"] == mmfolder.RELEASE else int(data["iteration"]),
            model=validate(ModelConfig, data["model"], f"{path} model"),
            layout=ParallelLayout(**data["layout"]),
            split=ModelSplit(**splits),
            tensors=tuple(_entry(Entry, row) for row in data["tensors"]),
            optimizer=tuple(_entry(Moment, row) for row in data["optimizer"]),
            source=data["source"],
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged manifest ({error!r}). Restore it, or convert again.") from error


def _entry(cls: type, row: Mapping[str, Any]):
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    assert set(values) == {f.name for f in fields(cls)}, row
    return cls(**values)


def open_checkpoint(path: str | Path, iteration: int | str | None = None) -> Checkpoint:
    """The checkpoint that `mmfolder.resolve` finds, every file of it present and long enough."""
    folder = mmfolder.resolve(path, iteration)
    manifest = read_manifest(folder / mmfolder.MANIFEST)
    needed: dict[str, int] = {}
    for entry in (*manifest.tensors, *manifest.optimizer):
        needed[entry.file] = max(needed.get(entry.file, 0), entry.offset + entry.nbytes)
    for name, end in needed.items():
        file = folder / name
        if not file.is_file():
            raise UserError(
                f"{file}: missing, the manifest names it. The checkpoint is damaged: restore the file or use another iteration."
            )
        if file.stat().st_size < end:
            raise UserError(
                f"{file}: has {file.stat().st_size} bytes, the manifest needs {end}: cut short. Restore it or use another iteration."
            )
    return Checkpoint(folder=folder, manifest=manifest)


def verify(checkpoint: Checkpoint, only: Iterable[Entry | Moment] | None = None) -> list[str]:
    """Read every tensor and compare its CRC-32 with the manifest; returns the faults, by name."""
    faults = []
    for entry in only if only is not None else (*checkpoint.manifest.tensors, *checkpoint.manifest.optimizer):
        if entry.crc32 is None:
            continue
        found = file_crc(checkpoint.folder / entry.file, entry.offset, entry.nbytes)
        if found != entry.crc32:
            part = f".{entry.part}" if isinstance(entry, Moment) else ""
            faults.append(
                f"{entry.file}: {entry.name}{part}: CRC-32 is {found:08x}, the manifest says {entry.crc32:08x}"
            )
    return faults


def file_crc(file: Path, offset: int, nbytes: int, block: int = 8 << 20) -> int:
    """CRC-32 of a byte range of a file."""
    crc, view = 0, memoryview(bytearray(min(block, nbytes)))
    fd = os.open(file, os.O_RDONLY)
    try:
        while nbytes:
            got = os.preadv(fd, [view[: min(block, nbytes)]], offset)
            if got == 0:
                raise UserError(f"{file}: ends at byte {offset}, {nbytes} more were expected.")
            crc = zlib.crc32(view[:got], crc)
            offset, nbytes = offset + got, nbytes - got
    finally:
        os.close(fd)
    return crc
