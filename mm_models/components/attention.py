"""The two attentions: causal with grouped key-value heads for a decoder, per segment for a vision tower.

Both call `F.scaled_dot_product_attention` the way Hugging Face's `sdpa` does; none builds an S x S mask unless tokens are padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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


def causal_padding_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """(B, S) of 1 (token) and 0 (padding) -> (B, 1, S, S) bool, or None where nothing is padded."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    seq = attention_mask.shape[1]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=attention_mask.device).tril()
    return causal[None, None] & attention_mask.bool()[:, None, None, :]


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


def frame_lengths(grid_thw: torch.Tensor) -> list[int]:
    """Segment lengths of images (N, 3) of (t, h, w) patches: each frame attends to itself alone."""
    return [h * w for t, h, w in grid_thw.tolist() for _ in range(t)]
