"""A small stack of mixture-of-experts layers that features are tried on, with every value drawn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mm_models.components.moe import Experts, Router, routed_experts
from mm_models.components.norm import RMSNorm

HIDDEN, EXPERTS, TOP_K = 32, 8, 2


class Mixture(nn.Module):
    """Router and experts with the attribute that recompute binds. `ep_group`: the experts are this rank's share of all."""

    def __init__(self, local_experts: int = EXPERTS, ep_group=None):
        super().__init__()
        self.gate = Router(hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K)
        self.experts = Experts(experts=local_experts, hidden=HIDDEN, intermediate=16)
        self.replay, self.ep_group = None, ep_group

    def forward(self, x):
        chosen = self.replay.chosen() if self.replay else None
        rows, indices = routed_experts(x.flatten(0, 1), self.gate, self.experts, ep_group=self.ep_group, chosen=chosen)
        if self.replay:
            self.replay.note(indices)
        return rows.view_as(x)


class Layer(nn.Module):
    def __init__(self, **mixture):
        super().__init__()
        self.norm = RMSNorm(HIDDEN, eps=1e-5)
        self.mlp = Mixture(**mixture)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x, *, scale: tuple[torch.Tensor, torch.Tensor]):
        """(B, S, H) and a tuple of tensors by keyword, as decoder layers take their rotary embedding."""
        x = x + self.mlp(self.norm(x)) * scale[0]
        return x + self.down(F.gelu(self.up(x))) * scale[1]


class Stack(nn.Module):
    def __init__(self, layers: int = 3, **mixture):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**mixture) for _ in range(layers))

    def forward(self, x, scale):
        for layer in self.layers:
            x = layer(x, scale=scale)
        return x.square().sum()


def stack(seed: int = 0, layers: int = 3) -> Stack:
    torch.manual_seed(seed)
    model = Stack(layers)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(torch.randn(tensor.shape) * (0.3 if tensor.ndim > 1 else 0.1) + ("norm" in name))
    return model


def batch(seed: int, size: int = 2, length: int = 6) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, length, HIDDEN, generator=generator), tuple(torch.randn(2, HIDDEN, generator=generator))


def names(model: nn.Module) -> list[str]:
    return [f"layers.{index}" for index in range(len(model.layers))]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
