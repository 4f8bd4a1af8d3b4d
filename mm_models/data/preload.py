"""The next micro-batch copied to the device while this one computes (`enable_preload`).

One batch is read ahead: neither the order nor the position to resume from changes, since both count the batches that
training has taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def preloaded(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """The same batches with their tensors on `device`, copied on a stream of their own from pinned memory."""
    stream = torch.Stream(device)
    coming = _copy(next(batches), stream)
    for batch in batches:
        here, coming = coming, _copy(batch, stream)
        yield _arrived(here, stream)
    yield _arrived(coming, stream)


def _copy(batch: dict[str, Any], stream: torch.Stream) -> tuple[dict[str, Any], torch.Event]:
    with stream:
        moved = {
            key: value.to(stream.device, non_blocking=True) if isinstance(value, Tensor) else value
            for key, value in batch.items()
        }
    return moved, stream.record_event()


def _arrived(copied: tuple[dict[str, Any], torch.Event], stream: torch.Stream) -> dict[str, Any]:
    """The batch, once the device's present stream waits for its copy and keeps its memory."""
    batch, event = copied
    present = torch.accelerator.current_stream(stream.device)
    present.wait_event(event)
    for value in batch.values():
        if isinstance(value, Tensor):
            value.record_stream(present)
    return batch
