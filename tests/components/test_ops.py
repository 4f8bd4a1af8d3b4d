"""Choosing op variants: the definition everywhere, a fused one only where it exists."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from mm_models.components.norm import LayerNorm
from mm_models.errors import UserError
from mm_models.ops import choose, known
from mm_models.ops.reference import gelu, quick_gelu, rms_norm, silu_mul, swiglu
from mm_models.registry import table


def test_every_op_has_its_definition():
    assert all("torch" in variants for variants in known().values())
    chosen = choose("cpu")
    assert chosen["rms_norm"] is rms_norm
    assert chosen.describe().startswith("ops: causal_attention torch, gelu torch, grouped_matmul torch")


def test_a_variant_of_the_device_is_preferred_there_and_nowhere_else():
    table("ops").add("rms_norm/npu", "math:sqrt")
    try:
        assert choose("npu", ["rms_norm"]).ops["rms_norm"].hardware == "npu"
        assert choose("npu").ops["swiglu"].hardware is None
        assert choose("cpu")["rms_norm"] is rms_norm
    finally:
        table("ops")._targets.pop("rms_norm/npu")


def test_what_the_user_asked_for_must_exist():
    with pytest.raises(UserError, match="no fused variant of rms_norm, swiglu exists on cpu"):
        choose("cpu", ["swiglu", "rms_norm"])
    with pytest.raises(UserError, match="unknown op 'rmsnorm'; did you mean 'rms_norm'"):
        choose("cpu", ["rmsnorm"])


def test_swiglu_is_silu_mul_of_its_halves():
    gate, up = torch.randn(5, 8), torch.randn(5, 8)
    expected = torch.nn.functional.silu(gate) * up
    assert torch.equal(silu_mul(gate, up), expected) and torch.equal(swiglu(torch.cat([gate, up], dim=-1)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activations_and_layer_norm_are_hugging_faces(dtype):
    x = (4 * torch.randn(64, 32)).to(dtype)
    assert torch.equal(gelu(x), ACT2FN["gelu"](x)) and torch.equal(quick_gelu(x), ACT2FN["quick_gelu"](x))
    assert not torch.equal(gelu(x), quick_gelu(x))
    theirs, ours = torch.nn.LayerNorm(32, eps=1e-3, dtype=dtype), LayerNorm(32, eps=1e-3, dtype=dtype)
    torch.nn.init.normal_(theirs.weight), torch.nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))
