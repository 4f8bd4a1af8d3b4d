"""A micro-batch on its way from a loader's worker to the main process.

A tensor of shared memory costs the receiver an exchange over a socket, and the sender a page fault for every 4 KiB. So
what is small travels inside the message, and what is large is made where it will be shared (`empty`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

SMALL = 1 << 16
"""Bytes of a tensor that travels inside the message."""


def empty(*shape: int) -> Tensor:
    """An uninitialised float32 tensor; in a worker, of shared memory."""
    if get_worker_info() is None:
        return torch.empty(shape)
    storage = torch.UntypedStorage._new_shared(4 * math.prod(shape))
    return torch.empty(0).set_(storage, 0, shape)


class Parcel:
    """Made in the worker, opened in the main process."""

    def __init__(self, batch: dict[str, Any]):
        self._parts = {
            name: value.numpy() if isinstance(value, Tensor) and value.nbytes <= SMALL else value
            for name, value in batch.items()
        }

    def open(self) -> dict[str, Any]:
        return {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in self._parts.items()
        }

    def pin_memory(self) -> dict[str, Any]:
        """What the DataLoader calls where it pins."""
        return {name: value.pin_memory() if isinstance(value, Tensor) else value for name, value in self.open().items()}
