"""What the two attentions are told about a batch: the mask of a padded one, the segments of images. The kernels are ops."""

from __future__ import annotations

import torch


def causal_padding_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """(B, S) of 1 (token) and 0 (padding) -> (B, 1, S, S) bool, or None where nothing is padded."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    seq = attention_mask.shape[1]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=attention_mask.device).tril()
    return causal[None, None] & attention_mask.bool()[:, None, None, :]


def frame_lengths(grid_thw: torch.Tensor) -> list[int]:
    """Segment lengths of images (N, 3) of (t, h, w) patches: each frame attends to itself alone."""
    return [h * w for t, h, w in grid_thw.tolist() for _ in range(t)]
