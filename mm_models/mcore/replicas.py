"""Replicas that have drifted apart: every tensor that several ranks hold, hashed and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from mm_models.mcore.session import Session


def check_replicas(tensors: Mapping[str, torch.Tensor], session: Session, *, when: str) -> None:
    """Refuse to go on when a tensor that several ranks hold is not the same on all of them. A collective over the world.

    Ranks that hold the same part of a tensor are those with equal `_replica_key`; the first name that differs is reported with
    the ranks of each version.
    """
    mine = {name: (_replica_key(name, tensor, session), _digest(tensor)) for name, tensor in tensors.items()}
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    versions: dict[tuple, dict[str, list[int]]] = {}
    for rank, held in enumerate(found):
        for name, (key, digest) in held.items():
            versions.setdefault((name, *key), {}).setdefault(digest, []).append(rank)
    for (name, *_), digests in sorted(versions.items(), key=str):
        if len(digests) > 1:
            split = " and ".join(f"ranks {ranks}" for ranks in digests.values())
            raise RuntimeError(
                f"{when}: {name} is replicated, but {split} hold different values. The replicas have drifted apart."
            )


def _replica_key(name: str, tensor: torch.Tensor, session: Session) -> tuple:
    """Coordinates that choose which part of a tensor a rank holds: ranks with equal keys hold copies."""
    coords = session.coords
    if not getattr(tensor, "allreduce", True):
        return "expert", coords.etp, coords.ep
    if getattr(tensor, "tensor_model_parallel", False):
        return "tensor-parallel", coords.tp
    return ("replicated",)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()
