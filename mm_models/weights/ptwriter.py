"""Writes the `.pt` format of torch.save without torch: the file at full size, its tensors unwritten and aligned.

A `.pt` is a zip of stored (uncompressed) records: a pickle that names the tensors, and one record of raw bytes for each.
Only plain data (None, bool, int, float, str, bytes, lists, tuples, dicts) and tensors (`Spec`) are written; anything else is
refused. Every tensor has a record of its own on a 4096-byte boundary. The CRCs of the records are entered afterwards by
`seal`, so that the finished file is a valid zip. Not importing torch saves the converter five seconds and 250 MB.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mm_models.errors import UserError
from mm_models.weights.boxes import Shape, volume
from mm_models.weights.dtypes import itemsize

ALIGNMENT = 4096
STORAGES = {
    "F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage", "I64": "LongStorage",
    "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage", "U8": "ByteStorage", "BOOL": "BoolStorage",
}  # fmt: skip
_BIG = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor of a file, or one to be: data type and shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where a tensor lies: `path` are the keys that lead to it, `crc_at` the byte positions where the zip states its CRC
    (empty for a tensor that does not fill its record)."""

    path: tuple[str | int, ...]
    dtype: str
    shape: Shape
    offset: int
    crc_at: tuple[int, ...] = ()


def skeleton(path: Path, content: Mapping[str, Any]) -> dict[tuple, Found]:
    """Write `content`, in which every `Spec` becomes a tensor of unwritten bytes; returns where the tensors lie."""
    tensors: list[tuple[tuple, Spec]] = []
    pickled = b"\x80\x02" + _encode(content, (), tensors, path) + b"."
    stem = path.name.rpartition(".")[0] or path.name
    records: list[tuple[str, bytes | int]] = [("data.pkl", pickled), ("byteorder", b"little")]
    records += [(f"data/{i}", volume(spec.shape) * itemsize(spec.dtype)) for i, (_, spec) in enumerate(tensors)]
    records.append(("version", b"3\n"))
    with path.open("wb") as file:
        places, _ = write_zip(file, [(f"{stem}/{name}", data) for name, data in records])
    return {
        key: Found(
            path=key,
            dtype=spec.dtype,
            shape=spec.shape,
            offset=places[f"{stem}/data/{i}"][0],
            crc_at=places[f"{stem}/data/{i}"][1],
        )
        for i, (key, spec) in enumerate(tensors)
    }


def seal(path: Path, crcs: Sequence[tuple[Found, int]]) -> None:
    """Enter the CRCs of the written tensors into the zip, durably."""
    fd = os.open(path, os.O_WRONLY)
    try:
        for found, crc in crcs:
            for position in found.crc_at:
                os.pwrite(fd, struct.pack("<I", crc), position)
        os.fsync(fd)
    finally:
        os.close(fd)


# --- pickle -------------------------------------------------------------------------------------------------------


def _encode(value: Any, at: tuple, tensors: list[tuple[tuple, Spec]], file: Path) -> bytes:
    """The opcodes (protocol 2, no memo) that rebuild `value`; tensors found on the way are numbered in order."""
    kind = type(value)
    if kind is Spec:
        tensors.append((at, value))
        return encode_tensor(value, len(tensors) - 1)
    if value is None:
        return b"N"
    if kind is bool:
        return b"\x88" if value else b"\x89"
    if kind is int:
        return _integer(value)
    if kind is float:
        return b"G" + struct.pack(">d", value)
    if kind is str:
        raw = value.encode("utf-8")
        return b"X" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, Mapping):
        items = b"".join(_encode(k, at, [], file) + _encode(v, (*at, k), tensors, file) for k, v in value.items())
        return b"}(" + items + b"u"
    if kind in (list, tuple):
        items = b"".join(_encode(item, (*at, i), tensors, file) for i, item in enumerate(value))
        return b"](" + items + b"e" if kind is list else b"(" + items + b"t"
    raise UserError(
        f"{file}: {'.'.join(map(str, at))} is a {kind.__module__}.{kind.__qualname__}; only plain data and tensors are written."
    )


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw)) + raw


def encode_tensor(spec: Spec, number: int) -> bytes:
    """What torch.save writes for a contiguous CPU tensor with a storage of its own."""
    if spec.dtype not in STORAGES:
        raise UserError(f"data type {spec.dtype!r} cannot be written to a .pt file. Known: {', '.join(STORAGES)}.")

    def plain(value: Any) -> bytes:
        return _encode(value, (), [], Path())

    storage = b"(" + plain("storage") + f"ctorch\n{STORAGES[spec.dtype]}\n".encode() + plain(str(number)) + plain("cpu")
    storage += plain(volume(spec.shape)) + b"tQ"
    strides = tuple(volume(spec.shape[i + 1 :]) for i in range(len(spec.shape)))
    no_hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"".join(map(plain, (0, spec.shape, strides, False)))
        + no_hooks
        + b"tR"
    )


# --- zip ----------------------------------------------------------------------------------------------------------


def write_zip(
    file: BinaryIO, records: Sequence[tuple[str, bytes | int]], *, start: int = 0, alignment: int = ALIGNMENT
) -> tuple[dict[str, tuple[int, tuple[int, int]]], int]:
    """Stored records on aligned offsets from byte `start` of `file`; a size instead of bytes leaves a hole.

    Returns (offset, CRC positions) by name, counted in the file, and the byte behind the zip.
    """
    places: dict[str, tuple[int, tuple[int, int]]] = {}
    at, directory = 0, []
    for name, data in records:
        size, crc = (data, 0) if isinstance(data, int) else (len(data), zlib.crc32(data))
        header = _local_header(name, size, crc, at, alignment)
        file.seek(start + at)
        file.write(header)
        if not isinstance(data, int):
            file.write(data)
        directory.append((name, size, crc, at))
        places[name] = (start + at + len(header), (start + at + 14, 0))
        at += len(header) + size
    file.seek(start + at)
    for name, size, crc, before in directory:
        places[name] = (places[name][0], (places[name][1][0], file.tell() + 16))
        file.write(_central_header(name, size, crc, before))
    file.write(_end(len(directory), at, file.tell() - start - at))
    return places, file.tell()


def _local_header(name: str, size: int, crc: int, at: int, alignment: int) -> bytes:
    raw = name.encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _BIG else b""
    before = at + 30 + len(raw) + len(extra) + 4
    padding = -before % alignment
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding  # torch's own padding field
    shown = min(size, _BIG)
    return (
        struct.pack(
            "<4s5H3I2H", b"PK\3\4", 45 if size >= _BIG else 0, 0x800, 0, 0, 0, crc, shown, shown, len(raw), len(extra)
        )
        + raw
        + extra
    )


def _central_header(name: str, size: int, crc: int, at: int) -> bytes:
    raw, big = name.encode(), []
    if size >= _BIG:
        big += [size, size]
    if at >= _BIG:
        big.append(at)
    extra = struct.pack(f"<HH{len(big)}Q", 1, 8 * len(big), *big) if big else b""
    shown, version = min(size, _BIG), 45 if big else 0
    fixed = (
        b"PK\1\2",
        version,
        version,
        0x800,
        0,
        0,
        33,
        crc,
        shown,
        shown,
        len(raw),
        len(extra),
        0,
        0,
        0,
        0,
        min(at, _BIG),
    )
    return struct.pack("<4s6H3I5H2I", *fixed) + raw + extra


def _end(count: int, start: int, size: int) -> bytes:
    end = b""
    if start >= _BIG or size >= _BIG or count >= 0xFFFF:
        end += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    shown = min(count, 0xFFFF)
    return end + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, shown, shown, min(size, _BIG), min(start, _BIG), 0)
