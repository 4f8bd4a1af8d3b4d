"""The two norms, in Hugging Face's order of rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mm_models.ops.reference import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x²) + eps)` in fp32, cast back, then times `weight` in the dtype of `x`.

    Not `torch.nn.RMSNorm`, which multiplies by the weight in fp32 and rounds once: a quarter of bf16 values would differ.
    """

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype | None = None, op: Callable = rms_norm):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps, self.op = eps, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm` with weight and bias, its kernel bound as an op."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype | None = None, op: Callable = layer_norm):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps, self.op = eps, op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x, self.weight, self.bias, self.eps)
