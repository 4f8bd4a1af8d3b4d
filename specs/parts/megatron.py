"""What the families' specs on the Megatron target are made of: norms, attention, MLP, MoE, layers, a tower and a decoder's block.

Every function returns a ModuleSpec and touches no process group, device or weight.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer import ModuleSpec

from mm_models.components.vision import PatchEmbed
from mm_models.config.sections import TextDecoderConfig, VisionEncoderConfig
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

NORM_OPS = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}


def sequence_parallel(layout: ParallelLayout) -> bool:
    """Whether each TP rank holds a part of the decoder's tokens."""
    return layout.sequence_parallel and layout.tp > 1


def norm(
    size: int, eps: float, backend: BackendSpecProvider, *, kind: str = "RMSNorm", sequence_parallel: bool = False
) -> ModuleSpec:
    """RMSNorm or LayerNorm."""
    return ModuleSpec(
        module=backend.layer_norm(rms_norm=kind == "RMSNorm"),
        params={"size": size, "eps": eps, "op": backend.op(NORM_OPS[kind]), "sequence_parallel": sequence_parallel},
    )


def attention(backend: BackendSpecProvider, kind: str, *, module: type = SelfAttention, **params) -> ModuleSpec:
    """Self attention; `kind` as in `Provider.core_attention`, `params` of `module`."""
    return ModuleSpec(
        module=module,
        params=params,
        submodules=AttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            linear_proj=backend.row_parallel_linear(),
            core_attention=backend.core_attention(kind),
        ),
    )


def mlp(backend: BackendSpecProvider, *, activation: str = "swiglu", **params) -> ModuleSpec:
    """Two linears with the op `activation` between; `params` of `MLP`."""
    return ModuleSpec(
        module=MLP,
        params=params,
        submodules=MLPSubmodules(
            linear_fc1=backend.column_parallel_linear(),
            linear_fc2=backend.row_parallel_linear(),
            activation=backend.activation_func(activation),
        ),
    )


def moe(config: TextDecoderConfig, backend: BackendSpecProvider, sequence_parallel: bool) -> ModuleSpec:
    """A mixture of experts with a shared one."""
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
            shared_experts=mlp(
                backend,
                hidden=config.hidden_size,
                ffn=config.shared_ffn_hidden_size,
                sequence_parallel=sequence_parallel,
            ),
        ),
    )


def layer(norm: ModuleSpec, attention: ModuleSpec, mlp: ModuleSpec, *, post_norms: bool = False) -> ModuleSpec:
    """A pre-norm layer; `post_norms`: each branch's output is normed too, before it is added."""
    post = {"post_self_attn_layernorm": norm, "post_mlp_layernorm": norm} if post_norms else {}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=LayerSubmodules(
            input_layernorm=norm, self_attention=attention, pre_mlp_layernorm=norm, mlp=mlp, **post
        ),
    )


# --- decoder ------------------------------------------------------------------------------------------------------


def decoder(
    config: TextDecoderConfig,
    layout: ParallelLayout,
    stage: Stage,
    backend: BackendSpecProvider,
    layers: dict[int, ModuleSpec],
) -> ModuleSpec:
    """The block of one stage: its layers, and the final norm after the last."""
    final = norm(config.hidden_size, config.eps, backend, sequence_parallel=sequence_parallel(layout))
    return ModuleSpec(
        module=TransformerBlock,
        submodules=BlockSubmodules(layers=layers, final_layernorm=final if stage.last else None),
    )


def decoder_layers(
    config: TextDecoderConfig,
    layout: ParallelLayout,
    stage: Stage,
    backend: BackendSpecProvider,
    *,
    post_norms: bool = False,
) -> dict[int, ModuleSpec]:
    """Layers of grouped-query attention with M-RoPE and a gated MLP, or a mixture of experts where the decoder says so."""
    sp = sequence_parallel(layout)
    attend = attention(
        backend,
        "causal_interleaved" if config.rotary_interleaved else "causal",
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        qkv_bias=config.add_qkv_bias,
        sequence_parallel=sp,
    )
    before = norm(config.hidden_size, config.eps, backend, sequence_parallel=sp)
    dense = mlp(backend, hidden=config.hidden_size, ffn=config.ffn_hidden_size, sequence_parallel=sp)
    return {
        index: layer(before, attend, moe(config, backend, sp) if config.is_moe(index) else dense, post_norms=post_norms)
        for index in stage.layers
    }


# --- vision tower: TP without sequence parallel ---------------------------------------------------------------------


def tower(
    config: VisionEncoderConfig,
    stage: Stage,
    layers: dict[int, ModuleSpec],
    *,
    patch_bias: bool,
    final_layernorm: ModuleSpec | None = None,
    window: int | None = None,
    parts: Mapping[str, ModuleSpec] | None = None,
) -> ModuleSpec:
    """A tower of Conv3d patches and 2-D rotary; `parts` are further `VisionSubmodules`."""
    return ModuleSpec(
        module=VisionTransformer,
        params={
            "stage": stage,
            "head_dim": config.head_dim,
            "theta": config.rope_theta,
            "merge": config.spatial_merge_size,
            "patch": config.patch_size,
            "window": window,
        },
        submodules=VisionSubmodules(
            patch_embed=ModuleSpec(
                module=PatchEmbed,
                params={
                    "channels": config.in_channels,
                    "temporal": config.temporal_patch_size,
                    "patch": config.patch_size,
                    "hidden": config.hidden_size,
                    "bias": patch_bias,
                },
            ),
            blocks=ModuleSpec(
                module=TransformerBlock,
                submodules=BlockSubmodules(layers=layers, final_layernorm=final_layernorm if stage.last else None),
            ),
            **(parts or {}),
        ),
    )


def tower_attention(config: VisionEncoderConfig, backend: BackendSpecProvider, kind: str) -> ModuleSpec:
    """Attention of a tower with biases: as many key-value heads as heads."""
    return attention(
        backend,
        kind,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        qkv_bias=True,
        proj_bias=True,
        sequence_parallel=False,
    )
