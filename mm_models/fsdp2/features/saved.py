"""What a module keeps for the backward pass, counted beforehand on one call of it, and what recompute therefore saves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


def storage_of(tensor: Tensor) -> int:
    """What tells storages apart as long as both live. Of a DTensor, this rank's."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.untyped_storage()._cdata


def is_parameter(tensor: Tensor, module: nn.Module) -> bool:
    """Whether `tensor` lies in the storage of a parameter of `module`, one that FSDP has gathered for now included."""
    place = storage_of(tensor)
    return any(storage_of(p) == place for p in module.parameters())


def saved_bytes(module: nn.Module, *args, **kwargs) -> int:
    """Bytes of the storages that one forward of `module` keeps for its backward, beyond its inputs and its parameters."""
    given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if storage_of(tensor) not in given and not is_parameter(tensor, module):
            kept[storage_of(tensor)] = tensor  # alive, so that its address is not given to another
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*args, **kwargs)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del output
    return total


def recompute_saves(saved: Sequence[int]) -> int:
    """Bytes by which the peak falls when modules with these `saved_bytes` are recomputed: all of them but the largest.

    That one exists again while its backward runs. What the modules hand on to each other is held either way.
    """
    return sum(saved) - max(saved)
