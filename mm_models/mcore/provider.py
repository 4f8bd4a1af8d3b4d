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
        return parallel.Norm

    def core_attention(self, kind: str = "causal") -> Callable:
        """A function of (query, key, value, context): "causal" for a decoder, "segments" for a vision tower."""
        if kind == "causal":
            return partial(_causal, self.op("rotary"), self.op("causal_attention"))
        return partial(_segments, self.op("rotary_fp32"), self.op("segment_attention"))

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool = True, moe_use_legacy_grouped_gemm: bool = False
    ) -> tuple[type, None]:
        return Experts, None

    def activation_func(self) -> Callable:
        return self.op("swiglu")


def _causal(rotary, attention, query, key, value, context):
    cos, sin = context.rotary
    return attention(rotary(query, cos, sin), rotary(key, cos, sin), value, mask=context.mask)


def _segments(rotary, attention, query, key, value, context):
    cos, sin = context.rotary
    query, key = rotary(query.squeeze(1), cos, sin), rotary(key.squeeze(1), cos, sin)
    return attention(query, key, value.squeeze(1), lengths=context.lengths).unsqueeze(1)
