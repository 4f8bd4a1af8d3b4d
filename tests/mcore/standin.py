"""A stand-in for a model: one small network with what matters to the optimizer, wrapped and stepped as training does.

A weight, a bias, a norm, an fp32 router beside (possibly) bf16 tensors, and a stacked expert tensor flagged
`allreduce=False`, so that it is reduced over expert-data-parallel ranks. No test of the numbers of a real model uses it.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from mm_models import device
from mm_models.mcore.arguments import Arguments, parse

BASE = [
    "--mm-model",
    "model.json",
    "--mm-data",
    "data.json",
    "--micro-batch-size",
    "1",
    "--train-iters",
    "10",
    "--lr",
    "0.01",
    "--from-scratch",
]
SIZE, EXPERTS = 6, 4


def arguments(*extra: str) -> Arguments:
    return parse([*BASE, *extra])


class Network(torch.nn.Module):
    """x (rows, 6) -> scalar. Odd sizes, so that flat shards cut through tensors."""

    def __init__(self, dtype: torch.dtype, *, ep: int = 1, ep_rank: int = 0):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        make = lambda *shape: torch.nn.Parameter(torch.randn(*shape, generator=draw).to(dtype))  # noqa: E731
        self.weight = make(SIZE, SIZE)
        self.bias = make(SIZE)
        self.norm = make(SIZE)
        self.router = torch.nn.Parameter(torch.randn(EXPERTS, SIZE, generator=draw))
        experts = torch.randn(EXPERTS, 3, SIZE, generator=draw).to(dtype)
        self.experts = torch.nn.Parameter(experts[ep_rank * EXPERTS // ep : (ep_rank + 1) * EXPERTS // ep].clone())
        self.experts.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.to(self.weight.dtype) @ self.weight + self.bias) * self.norm
        gates = torch.sigmoid(hidden.float() @ self.router.T)
        mixed = torch.einsum("rh,eih->rei", hidden, self.experts).float().sum(-1)
        return (mixed.sum(-1) * gates.sum(-1)).pow(2).sum()


def start(ep: int = 1) -> None:
    """Device patches and core's process groups, for the world that the harness made."""
    device.prepare()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, distributed_timeout_minutes=1)


def wrap(network: torch.nn.Module, args: Arguments) -> DistributedDataParallel:
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=1, calculate_per_token_loss=True)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    return DistributedDataParallel(config, ddp, network)


def batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(100 + step)) / 4


def step(chunk: DistributedDataParallel, optimizer, number: int, rank: int, dp: int) -> None:
    """One step on this rank's rows of the global batch."""
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    chunk(batch(number).chunk(dp)[rank]).backward()
    chunk.finish_grad_sync()
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
