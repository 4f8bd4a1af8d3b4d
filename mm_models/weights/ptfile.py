"""Reads `.pt` files without their bytes and without torch: what is inside, and where each tensor lies.

The pickle is read by an unpickler that knows how torch describes a tensor, plain containers and, of foreign classes, only
`argparse.Namespace`, which the field's checkpoints hold: stricter than `weights_only=True`. Everything else is refused by
name, and no code of the file's choosing can run. Writing is `ptwriter`'s.

Refused: other classes, by name; tensors that are not contiguous; legacy (non-zip) and compressed files; files cut short.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mm_models.errors import UserError
from mm_models.weights.boxes import Shape, volume
from mm_models.weights.dtypes import TORCH_NAMES, itemsize
from mm_models.weights.ptwriter import ALIGNMENT, STORAGES, Found, Spec, seal, skeleton

__all__ = ["ALIGNMENT", "Found", "Spec", "scan", "seal", "skeleton"]


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape


def scan(path: str | Path) -> tuple[Any, dict[tuple, Found]]:
    """(content, tensors by key path) of a file. In the content every tensor is a `Spec`; no tensor data are read."""
    path = Path(path)
    with path.open("rb") as file:
        return scan_open(file, path)


def scan_open(file: BinaryIO, path: Path) -> tuple[Any, dict[tuple, Found]]:
    """The same of an open file, or of a part of one; `path` is what to call it."""
    if not zipfile.is_zipfile(file):
        raise UserError(f"{path}: not a zip-format .pt file (cut short, or saved in torch's format before 1.6).")
    with zipfile.ZipFile(file) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in records:
            raise UserError(f"{path}: a zip without data.pkl: not a file of torch.save.")
        with archive.open(records["data.pkl"]) as pickled:
            content = _Reader(pickled, path).load()
    starts = {
        key.removeprefix("data/"): _data_start(file, info, path)
        for key, info in records.items()
        if key.startswith("data/")
    }
    found: dict[tuple, Found] = {}
    return _walk(content, (), starts, found, path), found


def _walk(value: Any, at: tuple, starts: Mapping[str, int], found: dict[tuple, Found], path: Path) -> Any:
    if isinstance(value, _Tensor):
        contiguous = tuple(volume(value.shape[i + 1 :]) for i in range(len(value.shape)))
        if volume(value.shape) > 1 and any(
            n > 1 and s != c for n, s, c in zip(value.shape, value.strides, contiguous, strict=True)
        ):
            shown = ".".join(map(str, at))
            raise UserError(
                f"{path}: tensor {shown} is not contiguous (shape {value.shape}, strides {value.strides}). Save a contiguous copy."
            )
        start = starts.get(value.storage.key, 0) + value.offset * itemsize(value.dtype)
        found[at] = Found(path=at, dtype=value.dtype, shape=value.shape, offset=start)
        return Spec(dtype=value.dtype, shape=value.shape)
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**_walk(vars(value), at, starts, found, path))
    if isinstance(value, Mapping):
        return {key: _walk(item, (*at, key), starts, found, path) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walk(item, (*at, i), starts, found, path) for i, item in enumerate(value))
    return value


def _data_start(file, info: zipfile.ZipInfo, path: Path) -> int:
    """Where a record's bytes begin: behind its local header, whose extra field differs from the directory's."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise UserError(f"{path}: record {info.filename} is compressed; torch.save stores tensors as they are.")
    file.seek(info.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\3\4":
        raise UserError(f"{path}: damaged zip, no record at byte {info.header_offset}.")
    name_length, extra_length = struct.unpack("<2H", header[26:30])
    return info.header_offset + 30 + name_length + extra_length


# --- what a pickle may name ---------------------------------------------------------------------------------------


def _rebuild_tensor_v2(storage: _Storage, offset, shape, strides, *ignored) -> _Tensor:
    assert storage.dtype is not None, storage
    return _Tensor(storage, storage.dtype, offset, tuple(shape), tuple(strides))


def _rebuild_tensor_v3(storage: _Storage, offset, shape, strides, requires_grad, hooks, dtype, *ignored) -> _Tensor:
    return _Tensor(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data: _Tensor, *ignored) -> _Tensor:
    return data


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


def _same(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "Size"): tuple,
    ("torch", "device"): _same,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "Counter"): collections.Counter,
    ("argparse", "Namespace"): argparse.Namespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
    ("_codecs", "encode"): _latin1,
} | {("torch", name): dtype for dtype, name in STORAGES.items()}
_KNOWN |= {("torch", name): dtype for dtype, name in TORCH_NAMES.items()}
_KNOWN |= {("__builtin__", name): value for (module, name), value in list(_KNOWN.items()) if module == "builtins"}


class _Reader(pickle.Unpickler):
    """Knows the names above and no other."""

    def __init__(self, file, path: Path):
        super().__init__(file, encoding="utf-8")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise UserError(
                f"{self._path}: holds {module}.{name}, which is not plain data. Only argparse.Namespace is let in beside torch's own types."
            )
        return _KNOWN[module, name]

    def persistent_load(self, saved: Any) -> _Storage:
        """torch's ("storage", class, key, device, elements)."""
        return _Storage(dtype=saved[1], key=saved[2])

    def load(self) -> Any:
        try:
            return super().load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self._path}: damaged pickle: {error}.") from error
