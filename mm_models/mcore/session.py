"""What one process knows about its run, where the five callbacks of `pretrain_vlm.py` can reach it.

Megatron's callbacks take no context; `current()` is that context. `start` makes it: device, process group, core's groups,
seeds. It holds no state of training but `position`, which says where this rank is when something goes wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from mm_models import device as devices
from mm_models.layout import Coords, ParallelLayout
from mm_models.mcore.validation import RunPlan


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


@dataclass(frozen=True, kw_only=True)
class Session:
    """This rank's place in the run."""

    plan: RunPlan
    rank: int
    coords: Coords
    device: torch.device
    dtype: torch.dtype
    position: Position = field(default_factory=Position)

    @property
    def layout(self) -> ParallelLayout:
        return self.plan.layout

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes losses (on its last chunk)."""
        return self.coords.pp == self.layout.pp - 1

    @property
    def speaks_for_loss(self) -> bool:
        """True on exactly one rank of each model-parallel group that computes the loss."""
        return self.last_stage and self.coords.tp == 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (stage {self.coords.pp}, tp {self.coords.tp}, dp {self.coords.dp}, ep {self.coords.ep})"
        )


_current: list[Session] = []


def current() -> Session:
    """The session of this process. Only inside a run."""
    assert _current, "no run has been started in this process"
    return _current[-1]


def world_size() -> int:
    """Processes of this run, from the launcher's environment; one without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launcher_rank() -> int:
    """This process's rank before any world is joined, from the launcher's environment."""
    return int(os.environ.get("RANK", "0"))


def start(plan: RunPlan) -> Session:
    """Join the world, make core's process groups, seed this rank, and make the session current."""
    from mm_models.mcore import rng
    from mm_models.mcore.assembly import init_parallel

    device = devices.prepare(int(os.environ.get("LOCAL_RANK", "0")))
    join_world(
        plan.args.distributed_backend or devices.backend(device.type), minutes=plan.args.distributed_timeout_minutes
    )
    init_parallel(plan.layout, plan.split, timeout_minutes=plan.args.distributed_timeout_minutes)
    rank = torch.distributed.get_rank()
    session = Session(
        plan=plan,
        rank=rank,
        coords=plan.layout.coords(rank),
        device=device,
        dtype=torch.bfloat16 if plan.args.bf16 else torch.float32,
    )
    rng.seed(session)
    _current[:] = [session]
    return session


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
