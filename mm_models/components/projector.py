"""Projectors between a vision tower and a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GatedMerger(nn.Module):
    """GLM's patch merger: linear, LayerNorm, exact GELU, then a SwiGLU. (tokens, size) -> (tokens, size), no linear biases."""

    def __init__(self, *, size: int, intermediate: int, eps: float = 1e-5, dtype: torch.dtype | None = None):
        super().__init__()
        self.proj = nn.Linear(size, size, bias=False, dtype=dtype)
        self.post_projection_norm = nn.LayerNorm(size, eps=eps, dtype=dtype)
        self.gate_proj = nn.Linear(size, intermediate, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(size, intermediate, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, size, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.post_projection_norm(self.proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
