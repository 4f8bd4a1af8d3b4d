"""The backend provider: which class stands for each role in a layer spec, and which op variant is bound into it.

One class for every device, with the same parameter names and shapes, so that a checkpoint knows no device. The kernels are chosen in
`mm_models.ops` and reach modules as callables; two mechanisms for one choice would drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron.core.models.backends import BackendSpecProvider

from mm_models.components.moe import Experts
from mm_models.mcore import parallel
from mm_models.ops import Chosen, choose


class Provider(BackendSpecProvider):
    """Our adapters, with the ops of one device."""

    def __init__(self, device: str = "cpu", ops: Chosen | None = None):
        self.ops = ops or choose(device)

    def op(self, name: str) -> Callable:
        """The chosen variant of an op."""
        return self.ops[name]

    def column_parallel_linear(self) -> type:
        return parallel.ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return parallel.RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False) -> type:
        return parallel.RMSNorm if rms_norm else parallel.LayerNorm

    def core_attention(self, kind: str = "causal") -> Callable:
        """A function of (query, key, value, context); `kind` is one of `ATTENTIONS`."""
        function, rotary, attention = ATTENTIONS[kind]
        return partial(function, self.op(rotary), self.op(attention))

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool = True, moe_use_legacy_grouped_gemm: bool = False
    ) -> tuple[type, None]:
        return Experts, None

    def activation_func(self, name: str = "swiglu") -> Callable:
        """Between the two linears of an MLP; `swiglu` takes [gate; up]."""
        return self.op(name)


def _causal(rotary, attention, query, key, value, context):
    cos, sin = context.rotary
    return attention(rotary(query, cos, sin), rotary(key, cos, sin), value, mask=context.mask)


def _inside(lengths: str, rotary, attention, query, key, value, context):
    cos, sin = context.rotary
    query, key = rotary(query.squeeze(1), cos, sin), rotary(key.squeeze(1), cos, sin)
    return attention(query, key, value.squeeze(1), lengths=getattr(context, lengths)).unsqueeze(1)


ATTENTIONS = {
    "causal": (_causal, "rotary", "causal_attention"),
    "causal_interleaved": (_causal, "rotary_interleaved", "causal_attention"),
    "frames": (partial(_inside, "frames"), "rotary_fp32", "segment_attention"),
    "windows": (partial(_inside, "windows"), "rotary_fp32", "segment_attention"),
}
"""Kind -> (what calls the ops, rotary op, attention op): the first two of decoders, the last two inside the frames or the windows of
a vision tower's images."""
