"""GLM-4.5V on the FSDP2 target: which of Hugging Face's classes are replaced, and by what."""

from __future__ import annotations

from mm_models.components.moe import Experts, Router
from mm_models.fsdp2.assembly import Assembly, Replacement
from mm_models.fsdp2.experts import MoE
from mm_models.ops.reference import grouped_matmul_loop
from specs.parts import fsdp2 as parts


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


ASSEMBLY = Assembly(
    model_id="glm4v_moe",
    hf_class="transformers:Glm4vMoeForConditionalGeneration",
    replace=(
        *parts.whole("Glm4vMoe", tower="Glm4vMoeVisionModel"),
        *parts.glm_tower("Glm4vMoe", mlp_class="Glm4vMoeisionMlp"),
        Replacement(hf_class="Glm4vMoeTextRMSNorm", build=parts.rms_norm),
        Replacement(hf_class="Glm4vMoeTextRotaryEmbedding", build=parts.text_rotary),
        Replacement(hf_class="Glm4vMoeTextAttention", build=parts.text_attention),
        Replacement(hf_class="Glm4vMoeTextMLP", build=parts.mlp),
        Replacement(hf_class="Glm4vMoeTextTopkRouter", build=_router),
        Replacement(hf_class="Glm4vMoeTextExperts", build=_experts),
        Replacement(hf_class="Glm4vMoeTextMoE", build=_moe),
    ),
)
