"""The wrapper of a model chunk that has no data-parallel peers: gradients stay where autograd puts them.

Core's DDP copies every gradient into a buffer and clears it each step; with one data-parallel rank that is memory traffic for
nothing. This offers what the training step and core's optimizer ask of a wrapped chunk, and no more. fp32 parameters only: a
bf16 gradient is to be accumulated in fp32, which DDP's buffer does.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import nn

from mm_models.layout import ParallelLayout


class LocalGradients(nn.Module):
    """`module` with the interface of core's DistributedDataParallel. A parameter without a gradient gets a zero one."""

    def __init__(self, module: nn.Module, ddp_config: DistributedDataParallelConfig):
        super().__init__()
        self.module, self.config, self.ddp_config = module, module.config, ddp_config

    @staticmethod
    def suits(chunks: list[nn.Module], layout: ParallelLayout, ddp_config: DistributedDataParallelConfig) -> bool:
        """Whether nothing would be reduced and nothing accumulated in another dtype."""
        alone = layout.dp * layout.cp == layout.edp == 1 and not ddp_config.use_distributed_optimizer
        return alone and all(p.dtype == torch.float32 for chunk in chunks for p in chunk.parameters())

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        """Before a step."""
        for parameter in self.module.parameters():
            parameter.grad = parameter.main_grad = None

    def collect(self) -> None:
        """After the last backward: `main_grad`, which reductions and optimizer read, is the gradient itself."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.main_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None

    def finish_grad_sync(self) -> None:
        """There is no peer to wait for."""
