"""The image encoder of the Megatron target: the part of a vision tower that one stage holds, and the projector after it.

Between stages (patches, 1, hidden) travels; after the last part, merged features (image tokens, 1, decoder hidden). The tower runs TP
without sequence parallel: every TP rank holds all patches. A tower with window attention keeps its patches in window order from the
patch embedding on, stage after stage; the features go back to the images' order after the projector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from mm_models.components.attention import frame_lengths
from mm_models.components.rotary import inverse_frequencies, vision_cos_sin, vision_position_ids
from mm_models.components.windows import Windows, reorder, windows
from mm_models.layout import Stage
from mm_models.mcore.layers import AttentionContext


@dataclass(frozen=True, kw_only=True)
class VisionSubmodules:
    """The parts of a tower. `patch_embed`, `post_conv_layernorm` and `embeddings` are built where it begins, `downsample` where it ends."""

    patch_embed: ModuleSpec
    blocks: ModuleSpec
    post_conv_layernorm: ModuleSpec | type = IdentityOp
    embeddings: ModuleSpec | type = IdentityOp
    downsample: ModuleSpec | type = IdentityOp


class VisionTransformer(nn.Module):
    """Patches in, or the states of the stage before; states or features out. `window`, `patch`: sides in pixels; None: no windows."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: VisionSubmodules,
        stage: Stage,
        head_dim: int,
        theta: float,
        merge: int,
        patch: int,
        window: int | None,
    ):
        super().__init__()
        self.stage, self.merge, self.patch, self.window = stage, merge, patch, window
        self.inv_freq = inverse_frequencies(head_dim // 2, theta)  # no buffer: nothing can cast or drop it
        if stage.first:
            self.patch_embed = build_module(submodules.patch_embed)
            self.post_conv_layernorm = build_module(submodules.post_conv_layernorm, config=config)
            self.embeddings = build_module(submodules.embeddings)
        self.blocks = build_module(submodules.blocks, config=config)
        if stage.last:
            self.downsample = build_module(submodules.downsample)

    def windows(self, grid_thw: torch.Tensor) -> Windows | None:
        """The order of patches inside the tower, where that is not the images' own."""
        if self.window is None:
            return None
        return windows(grid_thw, merge=self.merge, window=self.window, patch=self.patch)

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor, order: Windows | None) -> torch.Tensor:
        """`x`: pixels (patches, features) on the first stage, else (patches, 1, hidden). `grid_thw` (images, 3)."""

        def ordered(patches: torch.Tensor) -> torch.Tensor:
            return patches if order is None else reorder(patches, order.index, self.merge**2)

        positions = vision_position_ids(grid_thw, self.merge)
        cos, sin = vision_cos_sin(positions, self.inv_freq.to(x.device))
        context = AttentionContext(
            rotary=(ordered(cos), ordered(sin)),
            frames=frame_lengths(grid_thw),
            windows=None if order is None else order.lengths,
        )
        if self.stage.first:
            x = self.post_conv_layernorm(self.patch_embed(x))
            x = ordered(self.embeddings(x, grid_thw, positions)).unsqueeze(1)
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
            self.projector = build_module(projector, config=config)

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        order = self.encoder.windows(grid_thw)
        x = self.encoder(x, grid_thw, order)
        if not self.stage.last:
            return x
        x = self.projector(x)
        return x if order is None else x[order.inverse]
