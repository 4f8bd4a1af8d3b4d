"""What the families' assemblies on the FSDP2 target are made of: builders that put our module in the place of a Hugging Face one.

A builder takes (module, config, context), as `Replacement` says. Sizes that the families' configurations name differently are read
from the module that is replaced. Refused: activations, rotary types and attention that no component computes.
"""

from __future__ import annotations

from functools import partial

from mm_models.components.norm import LayerNorm, RMSNorm
from mm_models.components.projector import GatedMerger
from mm_models.components.vision import PatchEmbed
from mm_models.errors import UserError
from mm_models.fsdp2.assembly import Replacement
from mm_models.fsdp2.head import Head
from mm_models.fsdp2.layers import (
    MLP,
    Downsample,
    FusedMLP,
    PatchMerger,
    PlainMLP,
    TextAttention,
    TextRotary,
    VisionAttention,
    VisionEmbeddings,
    VisionRotary,
)
from mm_models.fsdp2.model import Conditional, Multimodal, Tower, training


def rms_norm(module, config, context):
    return RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, op=context.ops["rms_norm"])


def layer_norm(module, config, context):
    return LayerNorm(module.weight.shape[0], eps=module.eps, op=context.ops["layer_norm"])


# --- decoder ------------------------------------------------------------------------------------------------------


def text_rotary(module, config, context, *, interleaved: bool = False):
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise UserError(
            f"config.json text_config.rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'."
        )
    return TextRotary(2 * len(module.inv_freq), rope["rope_theta"], module.mrope_section, interleaved=interleaved)


def text_attention(module, config, context, *, rotary: str = "rotary"):
    if set(getattr(config, "layer_types", ())) - {"full_attention"}:
        raise UserError(
            f"config.json text_config: use_sliding_window {config.use_sliding_window} with max_window_layers "
            f"{config.max_window_layers} of {config.num_hidden_layers} layers gives layer_types {config.layer_types}, and no kernel "
            "here has a sliding window. Set use_sliding_window false."
        )
    return TextAttention(
        dict(module.named_children()),
        head_dim=module.head_dim,
        rotary=context.ops[rotary],
        attention=context.ops["causal_attention"],
    )


def mlp(module, config, context):
    """Gated, of either part; three linears."""
    _expect(config, "silu")
    return MLP(module.gate_proj, module.up_proj, module.down_proj, silu_mul=context.ops["silu_mul"])


def fused_mlp(module, config, context):
    """Gated; gate and up are one linear."""
    _expect(config, "silu")
    return FusedMLP(module.gate_up_proj, module.down_proj, swiglu=context.ops["swiglu"])


def head(module, config, context):
    return Head(module.in_features, module.out_features)


# --- tower --------------------------------------------------------------------------------------------------------


def vision_rotary(module, config, context):
    return VisionRotary(2 * len(module.inv_freq), config.rope_parameters["rope_theta"])


def vision_embeddings(module, config, context):
    return VisionEmbeddings(side=config.image_size // config.patch_size, hidden=config.hidden_size)


def patch_embed(module, config, context):
    return PatchEmbed(
        channels=config.in_channels,
        temporal=config.temporal_patch_size,
        patch=config.patch_size,
        hidden=module.proj.out_channels,
        bias=module.proj.bias is not None,
    )


def vision_attention(module, config, context):
    return VisionAttention(
        module.qkv,
        module.proj,
        heads=module.num_heads,
        rotary=context.ops["rotary_fp32"],
        attention=context.ops["segment_attention"],
    )


def plain_mlp(module, config, context):
    """Two linears with the quick GELU between them."""
    _expect(config, "quick_gelu")
    return PlainMLP(module.fc1, module.fc2, activation=context.ops["quick_gelu"])


def downsample(module, config, context):
    return Downsample(hidden=config.hidden_size, out=config.out_hidden_size, merge=config.spatial_merge_size)


def glm_merger(module, config, context):
    return GatedMerger(
        size=config.out_hidden_size, intermediate=config.intermediate_size, eps=module.post_projection_norm.eps
    )


def qwen_merger(module, config, context):
    return PatchMerger(module.ln_q, module.mlp, activation=context.ops["gelu"])


def _expect(config, activation: str) -> None:
    if config.hidden_act != activation:
        raise UserError(
            f"config.json {config.model_type}.hidden_act is {config.hidden_act!r}, expected {activation!r}."
        )


# --- lists --------------------------------------------------------------------------------------------------------


def whole(name: str, *, tower: str, mixin: type = Tower) -> tuple[Replacement, ...]:
    """The model `name`ForConditionalGeneration, its `model`, its tower and its head."""
    return (
        Replacement(hf_class=f"{name}ForConditionalGeneration", build=_as(Conditional)),
        Replacement(hf_class=f"{name}Model", build=_as(Multimodal)),
        Replacement(hf_class=tower, build=_as(mixin)),
        Replacement(hf_class="Linear", at="lm_head", build=head),
    )


def glm_tower(name: str, *, mlp_class: str) -> tuple[Replacement, ...]:
    """What stands inside GLM's tower."""
    return (
        Replacement(hf_class=f"{name}RMSNorm", build=rms_norm),
        Replacement(hf_class=f"{name}VisionRotaryEmbedding", build=vision_rotary),
        Replacement(hf_class=f"{name}VisionEmbeddings", build=vision_embeddings),
        Replacement(hf_class=f"{name}VisionPatchEmbed", build=patch_embed),
        Replacement(hf_class="Conv2d", at="model.visual.downsample", build=downsample),
        Replacement(hf_class=f"{name}VisionPatchMerger", build=glm_merger),
        Replacement(hf_class=f"{name}VisionAttention", build=vision_attention),
        Replacement(hf_class=mlp_class, build=mlp),
    )


def _as(mixin: type):
    return partial(_training, mixin=mixin)


def _training(module, config, context, *, mixin: type):
    return training(module, mixin)
