"""Transformer layers of the Megatron target, assembled from ModuleSpecs: attention, MLP, MoE layer, layer, block.

All of them take and return (S, B, H): S / tp rows with sequence parallel in a decoder; patches with B = 1 in a vision tower.
Nothing numerical is written here: norms, attention, experts and activation come from `mm_models.components` and `mm_models.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from torch import nn
from torch.utils.checkpoint import checkpoint

from mm_models.components.moe import Experts, Router, routed_experts
from mm_models.mcore.parallel import expert_groups, mark_experts


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What every layer of a stage shares for one micro-batch: rotary (cos, sin), and a mask, or how many patches each frame has,
    and each window."""

    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None = None
    frames: list[int] | None = None
    windows: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """`granularity` None, "full" (whole layers) or "selective" (attention core); `layers`: how many of a block's, None = all."""

    granularity: str | None = None
    layers: int | None = None

    def whole(self, position: int) -> bool:
        """Whether the block's layer at `position` is recomputed whole."""
        return self.granularity == "full" and (self.layers is None or position < self.layers)


@dataclass(frozen=True, kw_only=True)
class AttentionSubmodules:
    linear_qkv: type
    linear_proj: type
    core_attention: Callable


class SelfAttention(nn.Module):
    """Grouped-query attention with one fused projection, its rows interleaved by key-value group: [queries; key; value] a group."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: AttentionSubmodules,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        sequence_parallel: bool,
        proj_bias: bool = False,
    ):
        super().__init__()
        self.per_group = heads // kv_heads
        self.head_dim = head_dim
        self.core_attention = submodules.core_attention
        self.linear_qkv = submodules.linear_qkv(
            hidden, (heads + 2 * kv_heads) * head_dim, config=config, bias=qkv_bias, sequence_parallel=sequence_parallel
        )
        self.linear_proj = submodules.linear_proj(
            heads * head_dim, hidden, config=config, bias=proj_bias, sequence_parallel=sequence_parallel
        )

    def forward(self, x: torch.Tensor, context: AttentionContext, recompute_core: bool = False) -> torch.Tensor:
        qkv = self.linear_qkv(x)
        seq, batch = qkv.shape[:2]
        grouped = qkv.view(seq, batch, -1, self.per_group + 2, self.head_dim)  # S B G (q..q k v) D
        query, key, value = grouped.split([self.per_group, 1, 1], dim=3)
        query = query.reshape(seq, batch, -1, self.head_dim)
        key, value = key.squeeze(3), value.squeeze(3)
        return self.linear_proj(_core(self.core_attention, query, key, value, context, recompute_core))


class StackedAttention(nn.Module):
    """Attention without biases whose fused projection keeps [queries; keys; values], each third split over TP by whole heads."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: AttentionSubmodules,
        hidden: int,
        head_dim: int,
        sequence_parallel: bool,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.core_attention = submodules.core_attention
        how = {"config": config, "bias": False, "sequence_parallel": sequence_parallel}
        self.qkv = submodules.linear_qkv(hidden, 3 * hidden, **how)
        self.proj = submodules.linear_proj(hidden, hidden, **how)

    def forward(self, x: torch.Tensor, context: AttentionContext, recompute_core: bool = False) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)  # S B 3 heads D
        return self.proj(_core(self.core_attention, query, key, value, context, recompute_core))


def _core(attention: Callable, query, key, value, context: AttentionContext, recompute: bool) -> torch.Tensor:
    if recompute:
        return checkpoint(attention, query, key, value, context, use_reentrant=False)
    return attention(query, key, value, context)


@dataclass(frozen=True, kw_only=True)
class MLPSubmodules:
    linear_fc1: type
    linear_fc2: type
    activation: Callable


class MLP(nn.Module):
    """Two linears, `hidden` -> `ffn` -> `out` (None: `hidden`). `gated`: fused [gate; up] weights, each half split over TP by itself."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        hidden: int,
        ffn: int,
        sequence_parallel: bool,
        out: int | None = None,
        gated: bool = True,
        bias: bool = False,
    ):
        super().__init__()
        how = {"config": config, "bias": bias, "sequence_parallel": sequence_parallel}
        self.activation = submodules.activation
        self.linear_fc1 = submodules.linear_fc1(hidden, 2 * ffn if gated else ffn, **how)
        self.linear_fc2 = submodules.linear_fc2(ffn, out or hidden, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


@dataclass(frozen=True, kw_only=True)
class MoESubmodules:
    experts: type[Experts]
    shared_experts: ModuleSpec


class MoELayer(nn.Module):
    """Router, routed experts over the expert grid, and the shared expert as a tensor-parallel MLP."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        submodules: MoESubmodules,
        hidden: int,
        ffn: int,
        router: dict,
        matmul: Callable,
        activation: Callable,
        sequence_parallel: bool,
    ):
        super().__init__()
        self.groups = expert_groups()
        ep, etp = self.groups["ep_group"].size(), self.groups["etp_group"].size()
        self.router = Router(hidden=hidden, **router)
        for tensor in self.router.parameters():
            tensor.sequence_parallel = sequence_parallel
        self.experts = submodules.experts(
            experts=router["experts"] // ep,
            hidden=hidden,
            intermediate=ffn // etp,
            matmul=matmul,
            activation=activation,
        )
        mark_experts(self.experts)
        self.shared_experts = build_module(submodules.shared_experts, config=config)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(S, B, H) -> (S, B, H) and the chosen expert indices; `chosen` replays the indices of an earlier forward."""
        routed, indices = routed_experts(
            x.reshape(-1, x.shape[-1]), self.router, self.experts, **self.groups, chosen=chosen
        )
        return routed.view(x.shape) + self.shared_experts(x), indices


@dataclass(frozen=True, kw_only=True)
class LayerSubmodules:
    input_layernorm: ModuleSpec
    self_attention: ModuleSpec
    pre_mlp_layernorm: ModuleSpec
    mlp: ModuleSpec
    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class TransformerLayer(nn.Module):
    """Pre-norm layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`; each branch normed once more where a post norm is given."""

    def __init__(self, *, config: TransformerConfig, submodules: LayerSubmodules):
        super().__init__()
        self.input_layernorm = build_module(submodules.input_layernorm, config=config)
        self.self_attention = build_module(submodules.self_attention, config=config)
        self.post_self_attn_layernorm = build_module(submodules.post_self_attn_layernorm, config=config)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, config=config)
        self.mlp = build_module(submodules.mlp, config=config)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, config=config)

    def forward(
        self, x: torch.Tensor, context: AttentionContext, recompute_core: bool = False, replay: dict | None = None
    ) -> torch.Tensor:
        out = self.self_attention(self.input_layernorm(x), context, recompute_core)
        x = x + self.post_self_attn_layernorm(out)
        out = self.pre_mlp_layernorm(x)
        if not isinstance(self.mlp, MoELayer):
            out = self.mlp(out)
        else:
            out, chosen = self.mlp(out, None if replay is None else replay.get("chosen"))
            if replay is not None:
                replay["chosen"] = chosen
        return x + self.post_mlp_layernorm(out)


@dataclass(frozen=True, kw_only=True)
class BlockSubmodules:
    """The layers of one stage, by global index, and the norm after the last of the model, where it stands here."""

    layers: dict[int, ModuleSpec] = field(default_factory=dict)
    final_layernorm: ModuleSpec | None = None


class TransformerBlock(nn.Module):
    """The layers that one stage holds, named by their global index, run in order; then the final norm where it stands here."""

    def __init__(self, *, config: TransformerConfig, submodules: BlockSubmodules):
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(index): build_module(spec, config=config) for index, spec in submodules.layers.items()}
        )
        if submodules.final_layernorm is not None:
            self.final_layernorm = build_module(submodules.final_layernorm, config=config)
        self.recompute = Recompute()

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        core = self.recompute.granularity == "selective"
        for position, layer in enumerate(self.layers.values()):
            if self.recompute.whole(position) and torch.is_grad_enabled():
                # `replay` keeps the chosen experts, so that top-k cannot flip between forward and recompute.
                x = checkpoint(layer, x, context, replay={}, use_reentrant=False)
            else:
                x = layer(x, context, recompute_core=core and torch.is_grad_enabled())
        return x

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm, where it stands here."""
        return self.final_layernorm(x) if hasattr(self, "final_layernorm") else x
