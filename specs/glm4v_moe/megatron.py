"""GLM-4.5V on the Megatron target: one pure function per id, `(config, layout, stage, backend) -> ModuleSpec`.

No process group, no device, no weight is touched here. `*_layers` give the specs of the layers one stage holds, by global index;
the others wrap them into what `mcore.vlm_model` builds.
"""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer import ModuleSpec

from mm_models.components.projector import GlmMerger
from mm_models.components.vision import Downsample, InterpolatedPositions, PatchEmbed
from mm_models.config.model import TextDecoderConfig, VisionEncoderConfig, VisionProjectorConfig
from mm_models.layout import ParallelLayout, Stage
from mm_models.mcore.layers import (
    MLP,
    AttentionSubmodules,
    BlockSubmodules,
    LayerSubmodules,
    MLPSubmodules,
    MoELayer,
    MoESubmodules,
    SelfAttention,
    TransformerBlock,
    TransformerLayer,
)
from mm_models.mcore.vision import VisionSubmodules, VisionTransformer


def glm4v_vit(
    config: VisionEncoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The vision tower: Conv3d patches, bicubic learned positions, 2-D rotary, pre-norm blocks, 2 x 2 downsample."""
    norm = _norm(config.hidden_size, config.rms_norm_eps, False, backend)
    block = BlockSubmodules(
        layers=glm4v_vit_layers(config, layout, stage, backend), final_layernorm=norm if stage.last else None
    )
    return ModuleSpec(
        module=VisionTransformer,
        params={
            "stage": stage,
            "head_dim": config.head_dim,
            "theta": config.rope_theta,
            "merge": config.spatial_merge_size,
        },
        submodules=VisionSubmodules(
            patch_embed=ModuleSpec(
                module=PatchEmbed,
                params={
                    "channels": config.in_channels,
                    "temporal": config.temporal_patch_size,
                    "patch": config.patch_size,
                    "hidden": config.hidden_size,
                    "bias": True,
                },
            ),
            post_conv_layernorm=norm,
            embeddings=ModuleSpec(
                module=InterpolatedPositions,
                params={"side": config.image_size // config.patch_size, "hidden": config.hidden_size},
            ),
            blocks=ModuleSpec(module=TransformerBlock, submodules=block),
            downsample=ModuleSpec(
                module=Downsample,
                params={
                    "hidden": config.hidden_size,
                    "out": config.out_hidden_size,
                    "merge": config.spatial_merge_size,
                },
            ),
        ),
    )


def glm4v_vit_layers(
    config: VisionEncoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Tower layers of one stage. They split over TP without sequence parallel."""
    heads = config.num_attention_heads
    attention = _attention(
        backend,
        "segments",
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=config.head_dim,
        qkv_bias=False,
        sequence_parallel=False,
    )
    mlp = _mlp(backend, hidden=config.hidden_size, ffn=config.ffn_hidden_size, sequence_parallel=False)
    norm = _norm(config.hidden_size, config.rms_norm_eps, False, backend)
    return {index: _layer(norm, attention, mlp) for index in stage.layers}


def glm_mlp(
    config: VisionProjectorConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The merger between tower and decoder, whole on every TP rank."""
    return ModuleSpec(
        module=GlmMerger,
        params={
            "size": config.out_hidden_size,
            "intermediate": config.intermediate_size,
            "eps": config.layernorm_epsilon,
        },
    )


def glm4v_moe_lm(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The decoder's block of one stage."""
    norm = _norm(config.hidden_size, config.rms_norm_eps, _sequence_parallel(layout), backend)
    layers = glm4v_moe_lm_layers(config, layout, stage, backend)
    return ModuleSpec(
        module=TransformerBlock, submodules=BlockSubmodules(layers=layers, final_layernorm=norm if stage.last else None)
    )


def glm4v_moe_lm_layers(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Decoder layers of one stage: the first `first_k_dense_replace` of the model dense, the rest MoE with a shared expert."""
    sp = _sequence_parallel(layout)
    attention = _attention(
        backend,
        "causal",
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        qkv_bias=config.add_qkv_bias,
        sequence_parallel=sp,
    )
    norm = _norm(config.hidden_size, config.rms_norm_eps, sp, backend)
    dense = _mlp(backend, hidden=config.hidden_size, ffn=config.ffn_hidden_size, sequence_parallel=sp)
    return {
        index: _layer(norm, attention, _moe(config, backend, sp) if config.is_moe(index) else dense)
        for index in stage.layers
    }


def _sequence_parallel(layout: ParallelLayout) -> bool:
    return layout.sequence_parallel and layout.tp > 1


def _layer(norm: ModuleSpec, attention: ModuleSpec, mlp: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=LayerSubmodules(input_layernorm=norm, self_attention=attention, pre_mlp_layernorm=norm, mlp=mlp),
    )


def _norm(size: int, eps: float, sequence_parallel: bool, backend: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=backend.layer_norm(rms_norm=True),
        params={"size": size, "eps": eps, "op": backend.op("rms_norm"), "sequence_parallel": sequence_parallel},
    )


def _attention(backend: BackendSpecProvider, kind: str, **params) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params=params,
        submodules=AttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            linear_proj=backend.row_parallel_linear(),
            core_attention=backend.core_attention(kind),
        ),
    )


def _mlp(backend: BackendSpecProvider, **params) -> ModuleSpec:
    return ModuleSpec(
        module=MLP,
        params=params,
        submodules=MLPSubmodules(
            linear_fc1=backend.column_parallel_linear(),
            linear_fc2=backend.row_parallel_linear(),
            activation=backend.activation_func(),
        ),
    )


def _moe(config: TextDecoderConfig, backend: BackendSpecProvider, sequence_parallel: bool) -> ModuleSpec:
    experts, _ = backend.grouped_mlp_modules(True, False)
    return ModuleSpec(
        module=MoELayer,
        params={
            "hidden": config.hidden_size,
            "ffn": config.moe_ffn_hidden_size,
            "router": {
                "experts": config.num_moe_experts,
                "top_k": config.moe_router_topk,
                "groups": config.moe_router_num_groups,
                "top_groups": config.moe_router_group_topk,
                "normalise": config.norm_topk_prob,
                "scale": config.moe_router_topk_scaling_factor,
            },
            "matmul": backend.op("grouped_matmul"),
            "activation": backend.op("swiglu"),
            "sequence_parallel": sequence_parallel,
        },
        submodules=MoESubmodules(
            experts=experts,
            shared_experts=_mlp(
                backend,
                hidden=config.hidden_size,
                ffn=config.shared_ffn_hidden_size,
                sequence_parallel=sequence_parallel,
            ),
        ),
    )
