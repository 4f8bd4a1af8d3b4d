"""Writes DCP folders: `.distcp` files of torch.save'd boxes, then the manifest and `.metadata`, which stock torch reads.

A trainer: every rank calls `write_rank_file` with its boxes, one process gathers the records and calls `finish`. A
conversion lays out files of holes with `skeleton`, lets the engine fill them, and calls `seal` and `finish`. Every tensor is
cut along dimension 0 into items of at most 64 MiB. What is written here is durable; naming the folder is the caller's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.weights import mmfolder, ptfile, ptwriter
from mm_models.weights.boxes import Shape, partition_fault, volume
from mm_models.weights.dcp import manifest, metadata
from mm_models.weights.dcp.chunks import cut
from mm_models.weights.dcp.manifest import DcpManifest, ItemRecord
from mm_models.weights.dtypes import dtype_name, itemsize
from mm_models.weights.ptwriter import Found, Spec

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
WEIGHTS, OPTIMIZER = "model.", "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")


def weight_key(name: str, dcp_prefix: str = "") -> str:
    """The DCP key of a Hugging Face name."""
    return f"{WEIGHTS}{dcp_prefix}{name}"


def optimizer_key(name: str, part: str) -> str:
    """The DCP key of one part (`exp_avg`, `exp_avg_sq`, `step`) of a parameter's optimizer state, by its Hugging Face name."""
    return f"{OPTIMIZER}{name}.{part}"


def rank_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


# --- from live tensors --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShardToWrite:
    """A box of a tensor: `tensor` is the local box (any device, any strides), `start` where it begins in the whole `shape`."""

    tensor: torch.Tensor
    start: Shape
    shape: Shape


def write_rank_file(folder: Path, rank: int, shards: Mapping[str, ShardToWrite]) -> list[ItemRecord]:
    """Write this rank's boxes, by DCP key, to its file in `folder`, durably; the records to gather.

    A box that several ranks hold is written by one of them: which one is the caller's choice, `finish` refuses two. Boxes
    without elements are passed over; a rank that has none writes no file.
    """
    shards = {key: shard for key, shard in shards.items() if shard.tensor.numel()}
    if not shards:
        return []
    records, name = [], rank_file(rank)
    with (folder / name).open("wb") as file:
        at = 0
        for key, shard in shards.items():
            local, dtype = shard.tensor.detach(), dtype_name(shard.tensor.dtype)
            shape = tuple(local.shape)
            for first, rows in cut(shape, volume(shape[1:]) * itemsize(dtype)):
                part = local[first : first + rows] if shape else local
                offsets = (shard.start[0] + first, *shard.start[1:]) if shape else ()
                item = _header(file, at, key, name, dtype, tuple(shard.shape), tuple(offsets), tuple(part.shape))
                records.append(_fill(file, item, part))
                at = item.record.start + item.record.length
        file.flush()
        os.fsync(file.fileno())
    return records


def _fill(file: BinaryIO, item: _Item, part: torch.Tensor) -> ItemRecord:
    import torch

    data = memoryview(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    file.seek(item.record.offset)
    file.write(data)
    crc = zlib.crc32(data)
    for position in item.found.crc_at:
        file.seek(position)
        file.write(crc.to_bytes(4, "little"))
    return replace(item.record, crc32=crc)


# --- files of holes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Item:
    record: ItemRecord
    found: Found


def _header(
    file: BinaryIO, at: int, key: str, name: str, dtype: str, shape: Shape, offsets: Shape, sizes: Shape
) -> _Item:
    """Everything of an item but its elements, at the first aligned byte from `at`."""
    at += -at % ALIGNMENT
    spec = Spec(dtype=dtype, shape=sizes)
    pickled = b"\x80\x02" + ptwriter.encode_tensor(spec, 0) + b"."
    data = volume(sizes) * itemsize(dtype)
    records = [("data.pkl", pickled), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n")]
    places, end = ptwriter.write_zip(file, [(f"archive/{n}", d) for n, d in records], start=at, alignment=ALIGNMENT)
    offset, crc_at = places["archive/data/0"]
    record = ItemRecord(
        key=key,
        file=name,
        start=at,
        length=end - at,
        offset=offset,
        dtype=dtype,
        shape=shape,
        offsets=offsets,
        sizes=sizes,
        crc32=None,
    )
    return _Item(record=record, found=Found(path=(), dtype=dtype, shape=sizes, offset=offset, crc_at=crc_at))


def skeleton(path: Path, items: Iterable[tuple[str, str, Shape, Shape, Shape]]) -> tuple[list[ItemRecord], list[Found]]:
    """A file of (key, dtype, whole shape, offsets, sizes) whose elements are holes; the records, and where they are sealed."""
    made, at = [], 0
    with path.open("wb") as file:
        for key, dtype, shape, offsets, sizes in items:
            made.append(_header(file, at, key, path.name, dtype, shape, offsets, sizes))
            at = made[-1].record.start + made[-1].record.length
    return [item.record for item in made], [item.found for item in made]


seal = ptfile.seal


# --- the folder's description -------------------------------------------------------------------------------------


def finish(
    folder: Path,
    records: Sequence[ItemRecord],
    *,
    model: ModelConfig,
    expert_layout: str,
    dcp_prefix: str = "",
    iteration: int | None = None,
    source: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write `.metadata` and the manifest over all ranks' `records`; `training` is plain data, given back by `open_dcp`.

    Refused: a tensor whose boxes do not cover it exactly once, or that has two shapes or data types.
    """
    tensors = {key: _tensor(key, group) for key, group in manifest.by_key(records).items()}
    content = metadata.dump(metadata.Metadata(tensors=tensors, blobs={}), {key: _path(key) for key in tensors})
    with (folder / metadata.METADATA).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    manifest.write(
        folder,
        DcpManifest(
            iteration=iteration,
            model=model,
            expert_layout=expert_layout,
            dcp_prefix=dcp_prefix,
            items=tuple(records),
            source=source or {},
            training=training or {},
        ),
    )
    mmfolder.sync_folder(folder)


def _tensor(key: str, group: Sequence[ItemRecord]) -> metadata.TensorMeta:
    kinds = {(item.dtype, item.shape) for item in group}
    if len(kinds) > 1:
        raise UserError(f"{key}: ranks disagree about it: {', '.join(f'{d} {s}' for d, s in sorted(kinds))}.")
    if fault := partition_fault(group[0].shape, [(item.offsets, item.sizes) for item in group]):
        files = ", ".join(sorted({item.file for item in group})[:8])
        raise UserError(f"{key}: {fault} (from {files}); every element must be written by exactly one rank.")
    items = tuple(
        metadata.TensorItem(
            offsets=item.offsets,
            sizes=item.sizes,
            place=metadata.Place(file=item.file, offset=item.start, length=item.length),
        )
        for item in group
    )
    return metadata.TensorMeta(dtype=group[0].dtype, shape=group[0].shape, items=items)


def _path(key: str) -> tuple[str, ...]:
    """The nested keys of a state dict that a DCP key stands for."""
    if key.startswith(OPTIMIZER):
        name, _, part = key.removeprefix(OPTIMIZER).rpartition(".")
        return ("optimizer", "state", name, part)
    head, _, rest = key.partition(".")
    return (head, rest) if rest else (head,)
