"""The backend provider: which class stands for each role in a layer spec.

One provider a device, all with the same parameter names and shapes, so that a checkpoint knows no device. The kernel inside
a class is chosen in `mm_models.ops`; here only the modules are.
"""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider

from mm_models.components.attention import causal_attention, segment_attention
from mm_models.components.moe import Experts
from mm_models.components.rotary import apply_rotary, apply_rotary_fp32
from mm_models.mcore import parallel
from mm_models.ops.reference import swiglu


class Provider(BackendSpecProvider):
    """Our adapters on every device."""

    def __init__(self, device: str = "cpu"):
        self.device = device

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

    def core_attention(self, kind: str = "causal"):
        """A function of (query, key, value, context): "causal" for a decoder, "segments" for a vision tower."""
        return {"causal": _causal, "segments": _segments}[kind]

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool = True, moe_use_legacy_grouped_gemm: bool = False) -> tuple[type, None]:
        return Experts, None

    def activation_func(self):
        return swiglu


def _causal(query, key, value, context):
    cos, sin = context.rotary
    return causal_attention(apply_rotary(query, cos, sin), apply_rotary(key, cos, sin), value, mask=context.mask)


def _segments(query, key, value, context):
    cos, sin = context.rotary
    query, key = apply_rotary_fp32(query.squeeze(1), cos, sin), apply_rotary_fp32(key.squeeze(1), cos, sin)
    return segment_attention(query, key, value.squeeze(1), lengths=context.lengths).unsqueeze(1)
