"""`.metadata` of a DCP folder: a pickle, read by an unpickler that knows DCP's own classes alone, and written without torch.

What stock `torch.distributed.checkpoint.save` writes (torch 2.6 to 2.13) names about a dozen classes; any other name is
refused with the name and nothing of the file's choosing is run. What is written here is read by stock DCP.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_models.errors import UserError
from mm_models.weights.boxes import Shape
from mm_models.weights.dtypes import TORCH_NAMES

METADATA = ".metadata"
_CLASSES, _STORAGE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
VERSION = "1.0.0"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an item lies: `file` is relative to the folder, `offset` and `length` are bytes of it."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class TensorItem:
    """A box of a tensor: `offsets` and `sizes` in its elements."""

    offsets: Shape
    sizes: Shape
    place: Place


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """A tensor: data type by its name here, its whole shape, and the boxes it is stored in."""

    dtype: str
    shape: Shape
    items: tuple[TensorItem, ...]


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """All tensors by key, and what else is stored (as bytes) by key."""

    tensors: Mapping[str, TensorMeta]
    blobs: Mapping[str, Place]


# --- reading ------------------------------------------------------------------------------------------------------


class _Record:
    """Stands in for any of DCP's classes: holds the state it was pickled with."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_in(name: str) -> type[_Record]:
    return type(name, (_Record,), {})


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _first(value: Any = None, *rest: Any) -> Any:
    return value


_KNOWN: dict[tuple[str, str], Any] = {
    (_CLASSES, name): _stand_in(name)
    for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                 "MetadataIndex", "StorageMeta")
} | {
    (_CLASSES, "_MEM_FORMAT_ENCODING"): _first,
    (_STORAGE, "_StorageInfo"): _stand_in("_StorageInfo"),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _first,
    ("pathlib", "PosixPath"): _joined,
    ("pathlib", "WindowsPath"): _joined,
    ("pathlib._local", "PosixPath"): _joined,
    ("collections", "OrderedDict"): dict,
} | {("torch", torch_name): name for name, torch_name in TORCH_NAMES.items()}  # fmt: skip


class _Reader(pickle.Unpickler):
    """Knows the names above and no other."""

    def __init__(self, file: Any, path: Path):
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise UserError(
                f"{self._path}: names {module}.{name}, which is none of DCP's own classes. The file is damaged, was changed, "
                "or holds what this tool does not read; it was not run."
            )
        return _KNOWN[module, name]


def read(path: Path) -> Metadata:
    """The content of a `.metadata` file. Refused: any other class, compressed or otherwise transformed items, items that are missing."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, path).load()
        return _content(content.state, path)
    except UserError:
        raise
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged metadata ({type(error).__name__}: {error}). Restore it.") from error


def _content(state: Mapping[str, Any], path: Path) -> Metadata:
    places: dict[tuple[str, Shape | None], Place] = {}
    for index, info in state["storage_data"].items():
        key, offset, told = index.state["fqn"], index.state.get("offset"), info.state
        if told.get("transform_descriptors"):
            raise UserError(
                f"{path}: {key} is stored through {told['transform_descriptors']}; only plain items are read."
            )
        place = Place(file=told["relative_path"], offset=told["offset"], length=told["length"])
        places[key, None if offset is None else tuple(offset)] = place
    tensors, blobs = {}, {}
    for key, meta in state["state_dict_metadata"].items():
        if type(meta).__name__ == "BytesStorageMetadata":
            blobs[key] = _place(places, key, None, path)
            continue
        items = [
            TensorItem(
                offsets=tuple(chunk.state["offsets"]),
                sizes=tuple(chunk.state["sizes"]),
                place=_place(places, key, tuple(chunk.state["offsets"]), path),
            )
            for chunk in meta.state["chunks"]
            if 0 not in chunk.state["sizes"]
        ]
        dtype = meta.state["properties"].state[0]
        tensors[key] = TensorMeta(dtype=dtype, shape=tuple(meta.state["size"]), items=tuple(items))
    return Metadata(tensors=tensors, blobs=blobs)


def _place(places: Mapping[tuple[str, Shape | None], Place], key: str, offset: Shape | None, path: Path) -> Place:
    if (key, offset) not in places:
        at = "" if offset is None else f" at {offset}"
        raise UserError(f"{path}: {key}{at} is described but not stored. The checkpoint is not complete.")
    return places[key, offset]


# --- writing ------------------------------------------------------------------------------------------------------


def dump(metadata: Metadata, tree: Mapping[str, Sequence[str]]) -> bytes:
    """The bytes of a `.metadata` file. `tree` says for every key which nested keys of the state dict it stands for."""
    return b"\x80\x02" + _Pickle().metadata(metadata, tree) + b"."


class _Pickle:
    """The opcodes (protocol 2) of DCP's objects; each class is named once and then recalled."""

    def __init__(self):
        self._memo: dict[tuple[str, str], int] = {}

    def _global(self, module: str, name: str) -> bytes:
        known = self._memo.get((module, name))
        if known is not None:
            return b"h" + bytes([known])
        self._memo[module, name] = len(self._memo)
        return f"c{module}\n{name}\n".encode() + b"q" + bytes([len(self._memo) - 1])

    def _object(self, name: str, state: bytes, module: str = _CLASSES) -> bytes:
        return self._global(module, name) + b")\x81" + state + b"b"

    def _call(self, module: str, name: str, argument: bytes) -> bytes:
        return self._global(module, name) + b"(" + argument + b"tR"

    def _size(self, shape: Shape) -> bytes:
        return self._call("torch", "Size", _plain(tuple(shape)))

    def metadata(self, metadata: Metadata, tree: Mapping[str, Sequence[str]]) -> bytes:
        described = {key: self._tensor(tensor) for key, tensor in metadata.tensors.items()}
        described |= {key: self._object("BytesStorageMetadata", b"}") for key in metadata.blobs}
        stored = [
            self._index(key, item.offsets, number) + self._info(item.place)
            for key, tensor in metadata.tensors.items()
            for number, item in enumerate(tensor.items)
        ]
        stored += [self._index(key, None, None) + self._info(place) for key, place in metadata.blobs.items()]
        state = {
            "state_dict_metadata": _dict(described),
            "planner_data": _plain({key: tuple(path) for key, path in tree.items()}),
            "storage_data": b"}(" + b"".join(stored) + b"u",
            "storage_meta": b"N",
            "version": _plain(VERSION),
        }
        return self._object("Metadata", _dict(state))

    def _tensor(self, tensor: TensorMeta) -> bytes:
        layout = self._call("torch.serialization", "_get_layout", _plain("torch.strided"))
        contiguous = self._call(_CLASSES, "_MEM_FORMAT_ENCODING", _plain(0))
        dtype = self._global("torch", TORCH_NAMES[tensor.dtype])
        properties = self._object(
            "TensorProperties", b"(" + dtype + layout + _plain(False) + contiguous + _plain(False) + b"t"
        )
        size = self._size(tensor.shape)  # before the chunks, as in the file: a class is named at its first use
        chunks = [self._chunk(item) for item in tensor.items]
        state = {"properties": properties, "size": size, "chunks": b"](" + b"".join(chunks) + b"e"}
        return self._object("TensorStorageMetadata", _dict(state))

    def _chunk(self, item: TensorItem) -> bytes:
        state = {"offsets": self._size(item.offsets), "sizes": self._size(item.sizes)}
        return self._object("ChunkStorageMetadata", _dict(state))

    def _index(self, key: str, offset: Shape | None, number: int | None) -> bytes:
        at = b"N" if offset is None else self._size(offset)
        return self._object("MetadataIndex", _dict({"fqn": _plain(key), "index": _plain(number), "offset": at}))

    def _info(self, place: Place) -> bytes:
        state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
        return self._object("_StorageInfo", _plain(state), _STORAGE)


def _dict(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(_plain(key) + value for key, value in items.items()) + b"u"


def _plain(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"J" + struct.pack("<i", value) if abs(value) < 1 << 31 else b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, str):
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, Mapping):
        return _dict({key: _plain(item) for key, item in value.items()})
    assert isinstance(value, tuple), value
    return b"(" + b"".join(map(_plain, value)) + b"t"
