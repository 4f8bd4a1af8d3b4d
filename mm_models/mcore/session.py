"""What one process knows about its run, where the five callbacks of `pretrain_vlm.py` can reach it.

Megatron's callbacks take no context; `current()` is that context. `start` makes it: device, process group, core's groups,
seeds. It holds no state of training but `position`, which says where this rank is when something goes wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from mm_models import device as devices
from mm_models.layout import Coords, ParallelLayout
from mm_models.mcore.validation import RunPlan
from mm_models.train import rng
from mm_models.train import session as sessions
from mm_models.train.session import Position


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


def current() -> Session:
    """The session of this process. Only inside a run."""
    return sessions.current()


def start(plan: RunPlan) -> Session:
    """Join the world, make core's process groups, seed this rank, and make the session current."""
    from mm_models.mcore.assembly import init_parallel

    device = devices.prepare(int(os.environ.get("LOCAL_RANK", "0")))
    sessions.join_world(
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
    seed(session)
    sessions.enter(session)
    return session


def seed(session: Session, *, extra: int = 0) -> None:
    """Seed everything: equal over TP (replicated tensors draw the same), different over DP and stages; `extra` moves it on."""
    coords = session.coords
    rng.seed(session.plan.args.seed + 100 * coords.pp + 10_000 * coords.dp + 1_000_003 * extra)
