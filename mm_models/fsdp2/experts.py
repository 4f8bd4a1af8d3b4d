"""The mixture-of-experts block in Hugging Face's place: `gate`, `experts` and `shared_experts`, tokens dispatched by the component."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from mm_models.components.moe import Experts, Router, through_experts


class Replay(Protocol):
    """Keeps the chosen experts of a forward for its recomputation, so that top-k cannot flip."""

    def chosen(self) -> torch.Tensor | None:
        """The indices (T, k) to use now, or None to choose."""

    def note(self, indices: torch.Tensor) -> None:
        """What was used."""


class MoE(nn.Module):
    """(B, S, H) -> (B, S, H). `ep_group` is set where the experts are split over ranks; `replay` where the block is recomputed.

    `gate` and `experts` are called as modules, so that hooks of FSDP run: each may be a group of its own.
    """

    def __init__(self, gate: Router, experts: Experts, shared_experts: nn.Module, *, dispatch: str = "alltoall"):
        super().__init__()
        self.experts, self.gate, self.shared_experts, self.dispatch = experts, gate, shared_experts, dispatch
        self.ep_group: dist.ProcessGroup | None = None
        self.replay: Replay | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, hidden.shape[-1])
        weights, indices = self.gate(tokens, None if self.replay is None else self.replay.chosen())
        if self.replay is not None:
            self.replay.note(indices)
        routed = through_experts(
            hidden=tokens,
            indices=indices,
            weights=weights,
            experts=self.experts,
            num_experts=self.gate.num_experts,
            ep_group=self.ep_group,
            dispatch=self.dispatch,
        )
        return routed.view(hidden.shape) + self.shared_experts(hidden)
