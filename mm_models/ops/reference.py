"""The torch definition of each op. Every other variant is tested against these."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., H), (H,) -> (..., H). Statistics in fp32, product with the weight in the dtype of `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., H), (H,), (H,) -> (..., H)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Exact GELU, by the error function."""
    return F.gelu(x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(1.702 x)`."""
    return x * torch.sigmoid(1.702 * x)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(..., I) x 2 -> (..., I): `silu(gate) * up`."""
    return F.silu(gate) * up


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2I) as [gate; up] -> (..., I): `silu(gate) * up`."""
    return silu_mul(*gate_up.chunk(2, dim=-1))


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


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(..., D) -> (-second half, first half)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """(..., D) -> each pair of neighbours (a, b) as (-b, a)."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `cos.shape[-1]` dimensions of each head of `x` (..., heads, D); cos, sin (..., rotary_dim) in x's dtype."""
    return _rotate(x, cos, sin, rotate_half)


def apply_rotary_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `apply_rotary`, by pairs of neighbouring dimensions; cos and sin hold each angle twice in a row."""
    return _rotate(x, cos, sin, rotate_pairs)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Callable) -> torch.Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([(rotated * cos) + (turn(rotated) * sin), passed], dim=-1)


def apply_rotary_fp32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate every dimension of each head of `x` (..., heads, D) in fp32 and cast back; cos, sin (..., D) fp32."""
    wide = x.float()
    return ((wide * cos.unsqueeze(-2)) + (rotate_half(wide) * sin.unsqueeze(-2))).to(x.dtype)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """(S, B, heads, D) with (S, B, kv heads, D) keys and values -> (S, B, heads * D).

    `mask` (B, 1, S, S) bool, True = may attend, from `causal_padding_mask`; None means plain causal.
    """
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # (B, heads, S, D)
    repeats = query.shape[1] // key.shape[1]
    if mask is not None and repeats > 1:  # as Hugging Face: with a mask the heads are repeated, not grouped
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=query.shape[-1] ** -0.5,
        enable_gqa=mask is None and repeats > 1,
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, lengths: list[int]
) -> torch.Tensor:
    """Full attention inside each segment: (T, heads, D) x 3 -> (T, heads * D); `lengths` sum to T.

    One call a segment, so memory grows with the largest segment squared at most, never with T squared.
    """
    query, key, value = (x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (query, key, value))
    scale = query[0].shape[-1] ** -0.5
    parts = [F.scaled_dot_product_attention(q, k, v, scale=scale) for q, k, v in zip(query, key, value)]
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1).squeeze(0).flatten(1)
