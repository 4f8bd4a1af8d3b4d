"""Projectors of the Megatron target: a merger whole on every TP rank, and one of tensor-parallel linears.

Both take (rows, 1, width) of the tower, every row on every TP rank, and return (image tokens, 1, decoder hidden).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import nn

from mm_models.components.projector import GatedMerger


class WholeMerger(GatedMerger):
    """The gated merger, the same on every TP rank."""

    def __init__(self, *, config: TransformerConfig, size: int, intermediate: int):
        super().__init__(size=size, intermediate=intermediate)


@dataclass(frozen=True, kw_only=True)
class NormMLPSubmodules:
    layernorm: ModuleSpec
    encoder: ModuleSpec


class NormMLP(nn.Module):
    """A norm on each patch, then an MLP on each run of patches that fills `merged`, its input's width."""

    def __init__(self, *, config: TransformerConfig, submodules: NormMLPSubmodules, merged: int):
        super().__init__()
        self.merged = merged
        self.layernorm = build_module(submodules.layernorm, config=config)
        self.encoder = build_module(submodules.encoder, config=config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.layernorm(x).view(-1, 1, self.merged))
