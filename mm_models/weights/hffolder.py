"""Hugging Face folders: their tensors from the headers alone, and new safetensors files at full size to fill.

Reads sharded folders (with `model.safetensors.index.json`) and single-file ones. Refused by name: a shard that is missing
or cut short, a tensor that is in two shards, that the index names but no shard holds or the other way round, an index
beside a single file, a folder without config.json or without safetensors. What a folder's config says is `config`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_models.config.strict import load_json
from mm_models.errors import UserError
from mm_models.weights.boxes import Shape, volume
from mm_models.weights.dtypes import itemsize

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
EXPERTS_MARK = "mm_experts.json"
"""Says that the experts of a folder are not in Hugging Face's orientation."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor in a safetensors file; `offset` counts from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        return volume(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class HfFolder:
    """An opened folder. `headers` are the raw header bytes of each shard, so that an equal file can be written again.

    `prefix` was taken off the tensors' names. `expert_layout` is what the folder says of its experts: only a folder that
    `moe_expert` merged into a layout that is not Hugging Face's says it.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    headers: Mapping[str, bytes]
    index: Mapping[str, Any] | None
    prefix: str = ""
    expert_layout: str | None = None

    @property
    def shards(self) -> dict[str, list[Stored]]:
        """Tensors by file name, each in file order."""
        shards: dict[str, list[Stored]] = {name: [] for name in self.headers}
        for tensor in self.tensors.values():
            shards[tensor.file.name].append(tensor)
        return {name: sorted(tensors, key=lambda t: t.offset) for name, tensors in shards.items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_hf_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def open_folder(path: str | Path, prefix: str = "") -> HfFolder:
    """Read config, index and headers; every fault of the folder is refused here. `prefix` is taken off the tensors' names."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder. Expected a Hugging Face folder ({CONFIG} and safetensors).")
    if not is_hf_folder(path):
        raise UserError(f"{path}: no {CONFIG} there. Expected a Hugging Face folder ({CONFIG} and safetensors).")
    config = load_json(path / CONFIG)
    files, index = _shard_files(path)
    tensors: dict[str, Stored] = {}
    headers: dict[str, bytes] = {}
    for file in files:
        headers[file.name], found = read_header(file)
        for tensor in found:
            if tensor.name in tensors:
                raise UserError(
                    f"{path}: tensor {tensor.name!r} is in both {tensors[tensor.name].file.name} and {file.name}; "
                    "which one counts is not known."
                )
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(path, index, tensors)
    if prefix:
        tensors = _without_prefix(path, tensors, prefix)
    return HfFolder(
        path=path,
        config=config,
        tensors=tensors,
        headers=headers,
        index=index,
        prefix=prefix,
        expert_layout=_said_layout(path, headers),
    )


def _without_prefix(path: Path, tensors: Mapping[str, Stored], prefix: str) -> dict[str, Stored]:
    if not any(name.startswith(prefix) for name in tensors):
        raise UserError(
            f"{path}: no tensor's name begins with the prefix {prefix!r} (the first: {min(tensors)}). Leave it out, or correct it."
        )
    return {(bare := name.removeprefix(prefix)): replace(tensor, name=bare) for name, tensor in tensors.items()}


def _said_layout(path: Path, headers: Mapping[str, bytes]) -> str | None:
    """What the marker file or any file's metadata says of the experts' layout."""
    if (path / EXPERTS_MARK).is_file():
        return load_json(path / EXPERTS_MARK).get("expert_layout")
    said = {(metadata_of(header) or {}).get("expert_layout") for header in headers.values()} - {None}
    return min(said) if said else None


def _shard_files(path: Path) -> tuple[list[Path], Mapping[str, Any] | None]:
    present = {file.name for file in path.glob("*.safetensors")}
    if (path / INDEX).is_file():
        if SINGLE in present:
            raise UserError(f"{path}: both {INDEX} and {SINGLE} are there; which one counts is not known. Remove one.")
        index = load_json(path / INDEX)
        names = sorted(set(index.get("weight_map", {}).values()))
        if not names:
            raise UserError(f"{path / INDEX}: no weight_map, or an empty one.")
        if missing := [name for name in names if name not in present]:
            raise UserError(
                f"{path}: {INDEX} names {len(names)} shards, missing: {', '.join(missing)}. Download them again."
            )
        return [path / name for name in names], index
    if not present:
        raise UserError(f"{path}: no *.safetensors there. Only safetensors weights are read.")
    if present == {SINGLE}:
        return [path / SINGLE], None
    counts = {int(m.group(1)) for name in present if (m := re.fullmatch(r".*-\d+-of-(\d+)\.safetensors", name))}
    for count in counts:
        numbers = {
            int(m.group(1)) for name in present if (m := re.fullmatch(rf".*-(\d+)-of-0*{count}\.safetensors", name))
        }
        if missing := sorted(set(range(1, count + 1)) - numbers):
            raise UserError(f"{path}: shards {missing} of {count} are missing, and so is {INDEX}. Download them again.")
    return [path / name for name in sorted(present)], None


def _check_index(path: Path, index: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    weight_map = index["weight_map"]
    for name, file in weight_map.items():
        if name not in tensors:
            raise UserError(f"{path}: {INDEX} says {name!r} is in {file}, but it is not there.")
        if tensors[name].file.name != file:
            raise UserError(f"{path}: {INDEX} says {name!r} is in {file}, but it is in {tensors[name].file.name}.")
    if extra := sorted(set(tensors) - set(weight_map)):
        raise UserError(
            f"{path}: {INDEX} does not list {', '.join(extra[:5])}{' ...' if len(extra) > 5 else ''}, "
            f"found in {tensors[extra[0]].file.name}."
        )


def read_header(file: Path) -> tuple[bytes, list[Stored]]:
    """(raw header, tensors) of a safetensors file; checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(size - 8, 100 << 20):
            raise UserError(f"{file}: not a safetensors file, or cut short ({size} bytes, header of {length}).")
        raw = opened.read(length)
    try:
        entries = json.loads(raw)
    except ValueError as error:
        raise UserError(f"{file}: the safetensors header is not valid JSON: {error}.") from error
    found, end = [], 0
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        tensor = Stored(
            name=name,
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
        )
        if entry["data_offsets"][1] - entry["data_offsets"][0] != volume(tensor.shape) * itemsize(
            tensor.dtype, f"{file}: {name}"
        ):
            raise UserError(
                f"{file}: tensor {name!r} of {tensor.dtype} {tensor.shape} does not fit its offsets {entry['data_offsets']}."
            )
        found.append(tensor)
        end = max(end, tensor.offset + tensor.nbytes)
    if end > size:
        raise UserError(f"{file}: has {size} bytes, its header promises {end}: cut short. Download it again.")
    return struct.pack("<Q", length) + raw, sorted(found, key=lambda tensor: tensor.offset)


def make_header(tensors: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with these (name, dtype, shape), laid out in that order, 8-byte aligned as safetensors does."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in tensors:
        size = volume(shape) * itemsize(dtype)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def metadata_of(header: bytes) -> Mapping[str, str] | None:
    return json.loads(header[8:]).get("__metadata__")


def skeleton(file: Path, header: bytes) -> list[Stored]:
    """Write a file with `header` and its data as holes; returns its tensors."""
    file.write_bytes(header)
    entries = json.loads(header[8:])
    end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
    os.truncate(file, len(header) + end)
    return read_header(file)[1]
