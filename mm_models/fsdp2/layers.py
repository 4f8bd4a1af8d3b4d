"""Our components in the places of a Hugging Face model: signature and layout, nothing numerical.

Parameters and buffers keep Hugging Face's names and shapes. Linear layers and embeddings stay Hugging Face's own (torch's).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mm_models.components import vision
from mm_models.components.rotary import inverse_frequencies, mrope_cos_sin, vision_cos_sin


class Rotary(nn.Module):
    """The two frequency buffers (not in a checkpoint), made anew by `rebuild_buffers` wherever the module was moved from meta."""

    def __init__(self, dim: int, theta: float):
        super().__init__()
        self.dim, self.theta = dim, theta
        for name in ("inv_freq", "original_inv_freq"):
            self.register_buffer(name, torch.empty(dim // 2), persistent=False)

    def rebuild_buffers(self, device: torch.device) -> None:
        """Both buffers from the formula, on the CPU in fp32, then moved: the same bits on every device."""
        for name in ("inv_freq", "original_inv_freq"):
            setattr(self, name, inverse_frequencies(self.dim, self.theta).to(device))


class TextRotary(Rotary):
    """M-RoPE of the decoder: (hidden, position_ids (3, B, S)) -> cos, sin (B, S, rotary_dim) in hidden's dtype.

    `interleaved`: for a rotation of neighbouring pairs.
    """

    def __init__(self, dim: int, theta: float, sections: list[int], *, interleaved: bool = False):
        super().__init__(dim, theta)
        self.sections, self.interleaved = list(sections), interleaved

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mrope_cos_sin(position_ids, self.inv_freq, self.sections, hidden.dtype, interleaved=self.interleaved)


class VisionRotary(Rotary):
    """2-D rotary of the tower: (hidden, rows and columns (patches, 2)) -> cos, sin (patches, head_dim) fp32."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vision_cos_sin(position_ids, self.inv_freq)


class VisionEmbeddings(vision.InterpolatedPositions):
    """Hugging Face hands rows and columns apart, and lengths that nothing needs here."""

    def forward(self, embeddings, lengths, image_shapes, h_coords, w_coords) -> torch.Tensor:
        return super().forward(embeddings, image_shapes, torch.stack((h_coords, w_coords), dim=-1))


class Downsample(vision.Downsample):
    """Hugging Face hands blocks (n, hidden, merge, merge), a view of the patches."""

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        return super().forward(blocks.permute(0, 2, 3, 1).reshape(-1, blocks.shape[1]))


class MLP(nn.Module):
    """Gated MLP of Hugging Face's three linears with our activation."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear, *, silu_mul: Callable):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.silu_mul = gate_proj, up_proj, down_proj, silu_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.silu_mul(self.gate_proj(x), self.up_proj(x)))


class FusedMLP(nn.Module):
    """Gated MLP of two linears, the first one's rows [gate; up]."""

    def __init__(self, gate_up_proj: nn.Linear, down_proj: nn.Linear, *, swiglu: Callable):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.swiglu = gate_up_proj, down_proj, swiglu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.swiglu(self.gate_up_proj(x)))


class PlainMLP(nn.Module):
    """Two linears with an activation between them."""

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear, *, activation: Callable):
        super().__init__()
        self.fc1, self.fc2, self.activation = fc1, fc2, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class PatchMerger(nn.Module):
    """Merger of a norm and two linears: (patches, hidden) -> (tokens, out), each patch normed, a token's patches side by side."""

    def __init__(self, ln_q: nn.Module, mlp: nn.Sequential, *, activation: Callable):
        super().__init__()
        self.ln_q, self.mlp, self.activation = ln_q, mlp, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, _, down = self.mlp
        return down(self.activation(up(self.ln_q(x).view(-1, up.in_features))))


class TextAttention(nn.Module):
    """Grouped-query attention of Hugging Face's four linears: (B, S, H) -> (B, S, H), rotary and kernel from the ops."""

    def __init__(self, linears: dict[str, nn.Linear], *, head_dim: int, rotary: Callable, attention: Callable):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, linears[name])
        self.head_dim, self.rotary, self.attention = head_dim, rotary, attention

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (linear(hidden_states).view(shape) for linear in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (self.rotary(x, *position_embeddings) for x in (query, key))
        heads = (x.transpose(0, 1) for x in (query, key, value))  # (S, B, heads, D)
        out = self.attention(*heads, mask=attention_mask)
        return self.o_proj(out.transpose(0, 1).contiguous()), None


class VisionAttention(nn.Module):
    """Attention inside each frame with Hugging Face's fused projection, its rows [queries | keys | values]: (T, H) -> (T, H)."""

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, *, heads: int, rotary: Callable, attention: Callable):
        super().__init__()
        self.qkv, self.proj, self.heads, self.rotary, self.attention = qkv, proj, heads, rotary, attention

    def forward(self, hidden_states, cu_seqlens, position_embeddings, **_) -> torch.Tensor:
        query, key, value = self.qkv(hidden_states).view(len(hidden_states), 3, self.heads, -1).unbind(1)
        query, key = (self.rotary(x, *position_embeddings) for x in (query, key))
        return self.proj(self.attention(query, key, value, lengths=cu_seqlens.diff().tolist()))
