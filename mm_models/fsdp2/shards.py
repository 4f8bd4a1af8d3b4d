"""The box of every tensor that this rank holds: the bridge between the sharded model and whatever reads or writes its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, kw_only=True)
class Shard:
    """`local` shares memory with the tensor; its first element is element `start` of the whole, whose shape is `shape`.
    `writes`: whether this rank saves it, true on exactly one of the ranks that hold the same box. `local` may be empty."""

    local: torch.Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    writes: bool

    def like(self, local: torch.Tensor) -> Shard:
        """The same box of another tensor."""
        return Shard(local=local, start=self.start, shape=self.shape, writes=self.writes)


def shard_of(tensor: torch.Tensor) -> Shard:
    """`tensor` is plain (held whole by every rank, saved by rank 0) or a DTensor. No copy."""
    if not isinstance(tensor, DTensor):
        local, shape = tensor.detach(), tuple(tensor.shape)
        return Shard(local=local, start=(0,) * len(shape), shape=shape, writes=dist.get_rank() == 0)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(shape), (local.shape, shape)
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    writes = local.numel() > 0 and all(at == 0 for at, placement in places if isinstance(placement, Replicate))
    return Shard(local=local, start=tuple(start), shape=tuple(tensor.shape), writes=writes)


def shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """`shard_of` of each."""
    return {name: shard_of(tensor) for name, tensor in tensors.items()}
