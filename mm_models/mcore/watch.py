"""What a run says when it goes wrong: every rank's stack with its place, and replicas that have drifted apart.

`Watchdog` prints the stacks of all threads of this rank when nothing has moved for nearly the collective timeout, so that
every rank is heard before the first timeout tears the others down. `describe_failure` is the text of a crash.
`check_replicas` hashes every tensor that several ranks hold and names the first that differs.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping

import torch

from mm_models.mcore.session import Position, Session

EARLY = 0.9
"""Fraction of the collective timeout after which a rank that has not moved prints its stack."""


class Watchdog:
    """A thread that watches `session.position`; use as a context manager around training."""

    def __init__(self, session: Session, *, seconds: float):
        self._session, self._seconds = session, seconds * EARLY
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mm-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(1)

    def _watch(self) -> None:
        seen, since = _snapshot(self._session.position), time.monotonic()
        while not self._stop.wait(min(1.0, self._seconds / 4)):
            now = _snapshot(self._session.position)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._seconds:
                self._report(time.monotonic() - since)
                return

    def _report(self, idle: float) -> None:
        write(f"{self._session} has not moved for {idle:.0f} s at {self._session.position}. Its stack:\n")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def _snapshot(position: Position) -> tuple:
    return position.step, position.doing, position.micro_batch, position.chunk


def write(text: str) -> None:
    """To stderr in one system call, so that ranks do not cut each other's lines."""
    sys.stderr.flush()
    os.write(2, text.encode())


def describe_failure(session: Session, error: BaseException) -> str:
    """Rank, place and stack of an exception that ends the run."""
    stack = "".join(traceback.format_exception(error))
    return f"{session} failed at {session.position}:\n{stack}"


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
