"""GLM-4.5V on the FSDP2 target: which of Hugging Face's classes are replaced, and by what."""

from __future__ import annotations

from mm_models.components.moe import Experts, Router
from mm_models.components.norm import RMSNorm
from mm_models.components.projector import GlmMerger
from mm_models.components.vision import PatchEmbed
from mm_models.errors import UserError
from mm_models.fsdp2.assembly import Assembly, Replacement
from mm_models.fsdp2.experts import MoE
from mm_models.fsdp2.head import Head
from mm_models.fsdp2.layers import (
    MLP,
    Downsample,
    TextAttention,
    TextRotary,
    VisionAttention,
    VisionEmbeddings,
    VisionRotary,
)
from mm_models.fsdp2.model import Conditional, Multimodal, Tower, training
from mm_models.ops.reference import grouped_matmul_loop


def _norm(module, config, context):
    return RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, op=context.ops["rms_norm"])


def _text_rotary(module, config, context):
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise UserError(
            f"config.json text_config.rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'."
        )
    dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    return TextRotary(dim, rope["rope_theta"], module.mrope_section)


def _vision_rotary(module, config, context):
    return VisionRotary(config.hidden_size // config.num_heads // 2, config.rope_parameters["rope_theta"])


def _vision_embeddings(module, config, context):
    return VisionEmbeddings(side=config.image_size // config.patch_size, hidden=config.hidden_size)


def _patch_embed(module, config, context):
    return PatchEmbed(
        channels=config.in_channels,
        temporal=config.temporal_patch_size,
        patch=config.patch_size,
        hidden=config.hidden_size,
        bias=module.proj.bias is not None,
    )


def _downsample(module, config, context):
    return Downsample(hidden=config.hidden_size, out=config.out_hidden_size, merge=config.spatial_merge_size)


def _merger(module, config, context):
    return GlmMerger(
        size=config.out_hidden_size, intermediate=config.intermediate_size, eps=module.post_projection_norm.eps
    )


def _text_attention(module, config, context):
    return TextAttention(
        dict(module.named_children()),
        head_dim=module.head_dim,
        rotary=context.ops["rotary"],
        attention=context.ops["causal_attention"],
    )


def _vision_attention(module, config, context):
    return VisionAttention(
        module.qkv,
        module.proj,
        heads=module.num_heads,
        rotary=context.ops["rotary_fp32"],
        attention=context.ops["segment_attention"],
    )


def _mlp(module, config, context):
    if config.hidden_act != "silu":
        raise UserError(f"config.json {config.model_type}.hidden_act is {config.hidden_act!r}, expected 'silu'.")
    return MLP(module.gate_proj, module.up_proj, module.down_proj, silu_mul=context.ops["silu_mul"])


def _router(module, config, context):
    return Router(
        hidden=config.hidden_size,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def _experts(module, config, context):
    return Experts(
        experts=config.n_routed_experts,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        layout=context.expert_layout,
        matmul=context.ops["grouped_matmul"] if context.grouped else grouped_matmul_loop,
        activation=context.ops["swiglu"],
    )


def _moe(module, config, context):
    return MoE(module.gate, module.experts, module.shared_experts, dispatch=context.dispatch)


def _head(module, config, context):
    return Head(module.in_features, module.out_features)


ASSEMBLY = Assembly(
    model_id="glm4v_moe",
    hf_class="transformers:Glm4vMoeForConditionalGeneration",
    replace=(
        Replacement(
            hf_class="Glm4vMoeForConditionalGeneration", build=lambda module, *_: training(module, Conditional)
        ),
        Replacement(hf_class="Glm4vMoeModel", build=lambda module, *_: training(module, Multimodal)),
        Replacement(hf_class="Glm4vMoeVisionModel", build=lambda module, *_: training(module, Tower)),
        Replacement(hf_class="Glm4vMoeRMSNorm", build=_norm),
        Replacement(hf_class="Glm4vMoeTextRMSNorm", build=_norm),
        Replacement(hf_class="Glm4vMoeTextRotaryEmbedding", build=_text_rotary),
        Replacement(hf_class="Glm4vMoeVisionRotaryEmbedding", build=_vision_rotary),
        Replacement(hf_class="Glm4vMoeVisionEmbeddings", build=_vision_embeddings),
        Replacement(hf_class="Glm4vMoeVisionPatchEmbed", build=_patch_embed),
        Replacement(hf_class="Conv2d", at="model.visual.downsample", build=_downsample),
        Replacement(hf_class="Glm4vMoeVisionPatchMerger", build=_merger),
        Replacement(hf_class="Glm4vMoeTextAttention", build=_text_attention),
        Replacement(hf_class="Glm4vMoeVisionAttention", build=_vision_attention),
        Replacement(hf_class="Glm4vMoeTextMLP", build=_mlp),
        Replacement(hf_class="Glm4vMoeisionMlp", build=_mlp),
        Replacement(hf_class="Glm4vMoeTextTopkRouter", build=_router),
        Replacement(hf_class="Glm4vMoeTextExperts", build=_experts),
        Replacement(hf_class="Glm4vMoeTextMoE", build=_moe),
        Replacement(hf_class="Linear", at="lm_head", build=_head),
    ),
)
