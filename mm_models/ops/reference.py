"""The torch definition of each op. Every other variant is tested against these."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., H), (H,) -> (..., H). Statistics in fp32, product with the weight in the dtype of `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2I) as [gate; up] -> (..., I): `silu(gate) * up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of `x` (M, in), sorted by group, times each group's `weight` (G, out, in) transposed -> (M, out).

    `offsets` (G,) int32: cumulative row counts. A group may be empty, and so may `x`.
    """
    if x.shape[0] == 0:  # the kernel refuses zero rows; this keeps both operands in the graph with zero gradients
        return x @ weight[0].T
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)


def grouped_matmul_loop(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same as `grouped_matmul`, one matrix product a group: the definition it is tested against."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix.T for rows, matrix in zip(x.split(counts), weight)])
