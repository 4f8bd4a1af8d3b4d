"""How the ranks of a run are divided, and the device meshes made of it.

Dense parameters live on (replicate, shard); experts on (ep_replicate, ep_fsdp, ep). Both span the whole world, the last axis fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mm_models.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Ranks along each axis: `replicate` x `shard` = `ep_replicate` x `ep_fsdp` x `ep` = `world`. Anything else is refused."""

    world: int
    shard: int
    replicate: int = 1
    ep: int = 1
    ep_fsdp: int = 1
    ep_replicate: int = 1

    def __post_init__(self):
        dense = self.replicate * self.shard
        experts = self.ep_replicate * self.ep_fsdp * self.ep
        if dense != self.world or experts != self.world:
            raise UserError(
                f"replicate {self.replicate} x shard {self.shard} = {dense} and ep_replicate {self.ep_replicate} x ep_fsdp "
                f"{self.ep_fsdp} x ep {self.ep} = {experts} must both be the world size {self.world}."
            )

    @classmethod
    def of(cls, world: int, *, shard: int | None = None, ep: int = 1, ep_fsdp: int | None = None) -> Sizes:
        """From what the user gives. `shard` None is the whole world; `ep_fsdp` None is the largest divisor of world / ep
        that is at most shard / ep, so that experts are never sharded wider than the rest of the model."""
        shard = world if shard is None else shard
        _divides("fully_shard_parallel_size", shard, world, "world size")
        _divides("expert_parallel_size", ep, world, "world size")
        left = world // ep
        if ep_fsdp is None:
            ep_fsdp = max(n for n in range(1, left + 1) if left % n == 0 and n <= max(1, shard // ep))
        _divides("expert_fully_shard_parallel_size", ep_fsdp, left, f"world size / expert_parallel_size {ep}")
        return cls(
            world=world,
            shard=shard,
            replicate=world // shard,
            ep=ep,
            ep_fsdp=ep_fsdp,
            ep_replicate=left // ep_fsdp,
        )


def _divides(name: str, part: int, whole: int, what: str) -> None:
    if part < 1 or whole % part:
        fitting = [n for n in range(1, whole + 1) if whole % n == 0]
        raise UserError(f"{name} is {part}, but it must divide the {what}: {whole}. Possible: {fitting}.")


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """`dense` (shard) or (replicate, shard); `experts` (ep_fsdp) or (ep_replicate, ep_fsdp), for `fully_shard`; `ep` (ep)."""

    sizes: Sizes
    dense: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """The ranks that hold each other's experts."""
        return self.ep.get_group()


def make(sizes: Sizes, device: str) -> Meshes:
    """The meshes over a joined world; `device` is "cpu", "cuda" or "npu". A collective over the world."""
    if dist.get_world_size() != sizes.world:
        raise UserError(f"the meshes are for {sizes.world} ranks, the world has {dist.get_world_size()}.")
    dense = init_device_mesh(device, (sizes.replicate, sizes.shard), mesh_dim_names=("replicate", "shard"))
    experts = init_device_mesh(
        device, (sizes.ep_replicate, sizes.ep_fsdp, sizes.ep), mesh_dim_names=("ep_replicate", "ep_fsdp", "ep")
    )
    return Meshes(
        sizes=sizes,
        dense=dense if sizes.replicate > 1 else dense["shard"],
        experts=experts["ep_replicate", "ep_fsdp"] if sizes.ep_replicate > 1 else experts["ep_fsdp"],
        ep=experts["ep"],
    )
