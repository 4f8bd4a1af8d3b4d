"""Gradients after the last backward of a step: completed, measured and clipped over all meshes, one number on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mm_models.train import norm as world


def fill_missing(model: nn.Module) -> None:
    """Complete the gradients: zero where no rank computed one, and the sum over all ranks where a parameter is not sharded.

    A trainable parameter that the global batch did not touch is stepped with a zero gradient, as on the Megatron target. A
    collective over the world where modules are ignored by sharding.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not isinstance(parameter, DTensor) and dist.get_world_size() > 1:
            dist.all_reduce(parameter.grad)


def pieces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor, int]]:
    """(name, parameter, this rank's part of the gradient, how many ranks hold the same part) of all that is trained."""
    size = dist.get_world_size()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if not parameter.requires_grad or grad is None:
            continue
        if not isinstance(grad, DTensor):
            yield name, parameter, grad, size
            continue
        mesh = grad.device_mesh
        parts = 1
        for axis, placement in enumerate(grad.placements):
            assert not placement.is_partial(), f"the gradient of {name} is not reduced: {grad.placements}"
            parts *= 1 if isinstance(placement, Replicate) else mesh.size(axis)
        yield name, parameter, grad.to_local(), size // parts


def norm(model: nn.Module) -> float:
    """The 2-norm of the whole gradient, the same number on every rank; not finite where any part of it is not. A collective."""
    return world.world_norm((grad, replicas) for _, _, grad, replicas in pieces(model))


def clip(model: nn.Module, norm: float, limit: float) -> float:
    """Scale every gradient by one factor so that the norm is at most `limit`; 0 does nothing. Returns the factor."""
    return world.clip((grad for _, _, grad, _ in pieces(model)), norm, limit)


def non_finite(model: nn.Module) -> list[str]:
    """Names of parameters whose gradient has a value on this rank that is not finite."""
    return [name for name, _, grad, _ in pieces(model) if not torch.isfinite(grad).all()]
