"""The image encoder of the Megatron target: the part of a vision tower that one stage holds, and the projector after it.

Between stages (patches, 1, hidden) travels; after the last part, merged features (image tokens, 1, decoder hidden). The tower runs TP
without sequence parallel: every TP rank holds all patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from mm_models.components.attention import frame_lengths
from mm_models.components.rotary import inverse_frequencies, vision_cos_sin, vision_position_ids
from mm_models.layout import Stage
from mm_models.mcore.layers import AttentionContext


@dataclass(frozen=True, kw_only=True)
class VisionSubmodules:
    """The parts of a tower. The first three are built where it begins, the last where it ends."""

    patch_embed: ModuleSpec
    post_conv_layernorm: ModuleSpec
    embeddings: ModuleSpec
    blocks: ModuleSpec
    downsample: ModuleSpec


class VisionTransformer(nn.Module):
    """Patches in, or the states of the stage before; states or merged features out."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: VisionSubmodules,
        stage: Stage,
        head_dim: int,
        theta: float,
        merge: int,
    ):
        super().__init__()
        self.stage, self.merge = stage, merge
        self.inv_freq = inverse_frequencies(head_dim // 2, theta)  # no buffer: nothing can cast or drop it
        if stage.first:
            self.patch_embed = build_module(submodules.patch_embed)
            self.post_conv_layernorm = build_module(submodules.post_conv_layernorm, config=config)
            self.embeddings = build_module(submodules.embeddings)
        self.blocks = build_module(submodules.blocks, config=config)
        if stage.last:
            self.downsample = build_module(submodules.downsample)

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """`x`: pixels (patches, features) on the first stage, else (patches, 1, hidden). `grid_thw` (images, 3)."""
        positions = vision_position_ids(grid_thw, self.merge)
        context = AttentionContext(
            rotary=vision_cos_sin(positions, self.inv_freq.to(x.device)), lengths=frame_lengths(grid_thw)
        )
        if self.stage.first:
            x = self.post_conv_layernorm(self.patch_embed(x))
            x = self.embeddings(x, grid_thw, positions).unsqueeze(1)
        x = self.blocks(x, context)
        if self.stage.last:
            x = self.downsample(self.blocks.finish(x).squeeze(1)).unsqueeze(1)
        return x


class ImageEncoder(nn.Module):
    """`encoder`, and `projector` where the tower ends."""

    def __init__(self, *, config: TransformerConfig, encoder: ModuleSpec, projector: ModuleSpec, stage: Stage):
        super().__init__()
        self.stage = stage
        self.encoder = build_module(encoder, config=config)
        if stage.last:
            self.projector = build_module(projector)

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x, grid_thw)
        return self.projector(x) if self.stage.last else x
