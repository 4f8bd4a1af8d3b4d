"""Qwen2.5-VL on the FSDP2 target: Qwen2-VL with windows, RMS norms and a gated MLP in the tower."""

from __future__ import annotations

from mm_models.fsdp2.assembly import Assembly, Replacement
from mm_models.fsdp2.model import WindowedTower
from specs.parts import fsdp2 as parts
from specs.qwen2_vl.fsdp2 import qwen

ASSEMBLY = Assembly(
    model_id="qwen2_5_vl",
    hf_class="transformers:Qwen2_5_VLForConditionalGeneration",
    replace=(
        *qwen(
            "Qwen2_5_VL",
            mixin=WindowedTower,
            tower="Qwen2_5_VisionTransformerPretrainedModel",
            patch_embed="Qwen2_5_VisionPatchEmbed",
            merger="Qwen2_5_VLPatchMerger",
            attention="Qwen2_5_VLVisionAttention",
        ),
        Replacement(hf_class="Qwen2_5_VLMLP", build=parts.mlp),
    ),
)
