"""Gradient norm and clipping, one formula on both targets.

Every rank adds ‖g‖² / replicas of the gradient pieces it steps; one all-reduce over the world gives every rank the same
number, not finite where any gradient of any rank is not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def world_norm(pieces: Iterable[tuple[Tensor, int]]) -> float:
    """The 2-norm of the whole gradient from (gradient piece of this rank, ranks that step the same piece). A collective."""
    norms, replicas = [], []
    for grad, count in pieces:
        norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))
        replicas.append(count)
    # One transfer, not one a piece; summed on the host, where every device has fp64.
    held = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist() if norms else []
    total = torch.tensor(sum((norm * norm / count for norm, count in zip(held, replicas)), 0.0), dtype=torch.float64)
    total = total.to(_world_device())
    dist.all_reduce(total)
    return total.sqrt().item()


def _world_device() -> torch.device:
    """Where collectives of the world group want their tensors."""
    return (
        torch.device("cpu") if dist.get_backend() == "gloo" else torch.device(torch.accelerator.current_accelerator())
    )


def clip(grads: Iterable[Tensor], norm: float, limit: float) -> float:
    """Scale every gradient so that the norm is at most `limit`; `limit` 0 does nothing. Returns the factor."""
    factor = limit / (norm + 1e-6) if limit > 0 else 1.0
    if factor >= 1.0:
        return 1.0
    for grad in grads:
        grad.mul_(factor)
    return factor
