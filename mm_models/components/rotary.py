"""Rotary embeddings: the decoder's M-RoPE (partial; by halves or by neighbouring pairs) and the vision tower's 2-D rotary.

Formulas: RoFormer (Su et al., 2021); M-RoPE of Qwen2-VL (Wang et al., 2024): a rotary frequency takes its position from the
temporal, height or width axis by `mrope_section`. Angles, cos and sin are computed in fp32. The decoder casts cos and sin to
the compute dtype and rotates there; the vision tower keeps them in fp32, rotates in fp32 and casts back.
"""

from __future__ import annotations

import torch


def inverse_frequencies(dim: int, theta: float) -> torch.Tensor:
    """(dim / 2,) fp32: `1 / theta^(2i / dim)`."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))


def mrope_cos_sin(
    position_ids: torch.Tensor,
    inv_freq: torch.Tensor,
    sections: list[int],
    dtype: torch.dtype,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (B, S, rotary_dim) in `dtype` from `position_ids` (3, B, S) of the axes T, H, W.

    Frequency i takes its axis from `sections` in order: the first `sections[0]` from T, then H, then W. It stands at i and
    i + rotary_dim / 2 for a rotation of halves; `interleaved`, at 2i and 2i + 1 for one of neighbouring pairs.
    """
    angles = position_ids[..., None].float() * inv_freq  # (3, B, S, rotary_dim / 2)

    def by_section(values: torch.Tensor) -> torch.Tensor:
        half = torch.cat([part[i % 3] for i, part in enumerate(values.split(sections, dim=-1))], dim=-1)
        return (half.repeat_interleave(2, dim=-1) if interleaved else torch.cat([half, half], dim=-1)).to(dtype)

    return by_section(angles.cos()), by_section(angles.sin())


def vision_position_ids(grid_thw: torch.Tensor, merge: int) -> torch.Tensor:
    """(patches, 2) int64: row and column of each patch, in the processor's order.

    Patches come grouped by merge x merge blocks: per frame by block row, block column, row in block, column in block.
    """
    ids = []
    for t, h, w in grid_thw.tolist():
        rows, cols = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        blocks = (h // merge, merge, w // merge, merge)
        rows, cols = (axis.reshape(blocks).transpose(1, 2).flatten() for axis in (rows, cols))
        ids.append(torch.stack([rows, cols], dim=-1).repeat(t, 1))
    return torch.cat(ids).to(grid_thw.device)


def vision_cos_sin(position_ids: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (patches, head_dim) fp32 from rows and columns (patches, 2); `inv_freq` (head_dim / 4,)."""
    angles = (position_ids[..., None].float() * inv_freq).flatten(1)  # [row angles | column angles]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
