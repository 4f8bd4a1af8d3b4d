"""Qwen2-VL on the FSDP2 target: which of Hugging Face's classes are replaced, and by what. Qwen2.5-VL is made of the same list."""

from __future__ import annotations

from mm_models.fsdp2.assembly import Assembly, Replacement
from mm_models.fsdp2.model import Tower
from specs.parts import fsdp2 as parts


def qwen(name: str, *, tower: str, patch_embed: str, merger: str, attention: str, mixin: type = Tower):
    """What both families have, under their names: all but the norms and the MLP of Qwen2-VL's blocks."""
    return (
        *parts.whole(name, tower=tower, mixin=mixin),
        Replacement(hf_class=f"{name}RMSNorm", build=parts.rms_norm),
        Replacement(hf_class=f"{name}RotaryEmbedding", build=parts.text_rotary),
        Replacement(hf_class=f"{name}Attention", build=parts.text_attention),
        Replacement(hf_class="Qwen2MLP", build=parts.mlp),
        Replacement(hf_class=f"{name}VisionRotaryEmbedding", build=parts.vision_rotary),
        Replacement(hf_class=patch_embed, build=parts.patch_embed),
        Replacement(hf_class=merger, build=parts.qwen_merger),
        Replacement(hf_class=attention, build=parts.vision_attention),
    )


ASSEMBLY = Assembly(
    model_id="qwen2_vl",
    hf_class="transformers:Qwen2VLForConditionalGeneration",
    replace=(
        *qwen(
            "Qwen2VL",
            tower="Qwen2VisionTransformerPretrainedModel",
            patch_embed="PatchEmbed",
            merger="PatchMerger",
            attention="VisionAttention",
        ),
        Replacement(hf_class="LayerNorm", build=parts.layer_norm),
        Replacement(hf_class="VisionMlp", build=parts.plain_mlp),
    ),
)
