"""One process of a run: its place in the launcher's world, where it is in the work, and the run that is current."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch


@dataclass
class Position:
    """Where this rank is: step (1-based), what it does there, micro-batch and chunk where that means something."""

    step: int = 0
    doing: str = "starting"
    micro_batch: int | None = None
    chunk: int | None = None

    def at(self, doing: str, *, micro_batch: int | None = None, chunk: int | None = None) -> None:
        self.doing, self.micro_batch, self.chunk = doing, micro_batch, chunk

    def __str__(self) -> str:
        text = f"step {self.step}, {self.doing}"
        if self.micro_batch is not None:
            text += f", micro-batch {self.micro_batch}"
        return text + (f", chunk {self.chunk}" if self.chunk is not None else "")


class Place(Protocol):
    """A target's session: its text names the rank, `position` says what it is doing."""

    position: Position


_current: list[Any] = []


def enter(session: Place) -> None:
    """Make `session` the one of this process."""
    _current[:] = [session]


def running() -> bool:
    """Whether a run has been started in this process."""
    return bool(_current)


def current() -> Any:
    """The session of this process. Only inside a run."""
    assert _current, "no run has been started in this process"
    return _current[-1]


def world_size() -> int:
    """Processes of this run, from the launcher's environment; one without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher_rank() -> int:
    """This process's rank before any world is joined, from the launcher's environment."""
    return int(os.environ.get("RANK", "0"))


def join_world(backend: str, *, minutes: int) -> None:
    """Join the process group that the launcher describes, or a world of one without a launcher."""
    if torch.distributed.is_initialized():
        return
    timeout = timedelta(minutes=minutes)
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
    else:
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
        )
