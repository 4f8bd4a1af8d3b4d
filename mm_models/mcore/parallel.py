"""Tensor-parallel linears and norms: core's parameters and collectives around `F.linear`.

Core's own forward adds a bias after the rounded product; `F.linear` adds it inside, as Hugging Face does, and only so is the
forward bit-equal. Gradients of replicated weights that see one rank's tokens (norms and row-parallel biases under sequence
parallel, the router) are marked `sequence_parallel` and summed over TP by `mcore.grads.finalize`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import nn

from mm_models.components import norm


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """(S / tp, B, in) with sequence parallel, else (..., in) -> (..., out / tp)."""

    def __init__(self, size_in: int, size_out: int, *, config: TransformerConfig, bias: bool, sequence_parallel: bool):
        super().__init__(size_in, size_out, config=config, init_method=None, bias=bias)
        self.sequence_parallel = sequence_parallel
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        elif self.tp_group.size() > 1:
            x = copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """(..., in / tp) -> (..., out), summed over TP; scattered along the sequence with sequence parallel.

    The bias is whole on every rank and added once, to the sum; alone in its group, inside the product.
    """

    def __init__(self, size_in: int, size_out: int, *, config: TransformerConfig, bias: bool, sequence_parallel: bool):
        super().__init__(
            size_in, size_out, config=config, init_method=None, bias=bias, input_is_parallel=True, skip_bias_add=False
        )
        self.sequence_parallel = sequence_parallel
        set_tensor_model_parallel_attributes(self.weight, True, 1, 1)
        if bias:
            self.bias.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return F.linear(x, self.weight, self.bias)
        x = F.linear(x, self.weight)
        if self.sequence_parallel:
            x = reduce_scatter_to_sequence_parallel_region(x, group=self.tp_group)
        else:
            x = reduce_from_tensor_model_parallel_region(x, group=self.tp_group)
        return x if self.bias is None else x + self.bias


class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
    """(B, S) ids -> (B, S, H), whole on every TP rank."""

    def __init__(self, vocab: int, hidden: int, *, config: TransformerConfig):
        super().__init__(vocab, hidden, init_method=None, config=config)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)


class RMSNorm(norm.RMSNorm):
    """RMSNorm whose weight says whether each TP rank sees only its own tokens."""

    def __init__(self, *, config: TransformerConfig, size: int, eps: float, op: Callable, sequence_parallel: bool):
        super().__init__(size, eps=eps, op=op)
        self.weight.sequence_parallel = sequence_parallel


class LayerNorm(norm.LayerNorm):
    """LayerNorm whose weight and bias say whether each TP rank sees only its own tokens."""

    def __init__(self, *, config: TransformerConfig, size: int, eps: float, op: Callable, sequence_parallel: bool):
        super().__init__(size, eps=eps, op=op)
        self.weight.sequence_parallel = self.bias.sequence_parallel = sequence_parallel


def mark_experts(module: nn.Module) -> None:
    """Tell core that these parameters belong to the expert grid: reduced over expert-data-parallel ranks only."""
    for parameter in module.parameters():
        parameter.allreduce = False
        parameter.tensor_model_parallel = True


def expert_groups() -> dict:
    """The two process groups `components.moe.routed_experts` takes."""
    return {
        "ep_group": parallel_state.get_expert_model_parallel_group(),
        "etp_group": parallel_state.get_expert_tensor_parallel_group(),
    }
