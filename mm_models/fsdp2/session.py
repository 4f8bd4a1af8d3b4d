"""What one process of an FSDP2 run knows about its place: plan, rank, device, meshes, and where it is when something goes wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from mm_models import device as devices
from mm_models.fsdp2 import mesh
from mm_models.fsdp2.validation import RunPlan
from mm_models.train import rng
from mm_models.train import session as sessions
from mm_models.train.session import Position


@dataclass(frozen=True, kw_only=True)
class Session:
    """This rank's place in the run."""

    plan: RunPlan
    rank: int
    device: torch.device
    meshes: mesh.Meshes
    position: Position = field(default_factory=Position)

    @property
    def world(self) -> int:
        return self.plan.sizes.world

    @property
    def ep_rank(self) -> int:
        """Which share of the experts this rank holds."""
        return self.rank % self.plan.sizes.ep

    def __str__(self) -> str:
        return f"rank {self.rank} (ep {self.ep_rank})" if self.plan.sizes.ep > 1 else f"rank {self.rank}"


def start(plan: RunPlan) -> Session:
    """Join the world, make the meshes, seed this rank, and make the session current."""
    training = plan.config.training
    device = devices.choose(int(os.environ.get("LOCAL_RANK", "0")))
    sessions.join_world(devices.backend(device.type), minutes=training.distributed_timeout_minutes)
    session = Session(
        plan=plan,
        rank=torch.distributed.get_rank(),
        device=device,
        meshes=mesh.make(plan.sizes, device.type),
    )
    seed(session)
    sessions.enter(session)
    return session


def seed(session: Session, *, extra: int = 0) -> None:
    """Seed everything, differently on every rank; `extra` moves it on."""
    rng.seed(session.plan.config.training.seed + 10_000 * session.rank + 1_000_003 * extra)
