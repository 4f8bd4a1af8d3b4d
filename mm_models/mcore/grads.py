"""After the last backward of a step: the reductions that make gradients whole, their norm, and clipping.

Gradients are summed everywhere, never averaged: the loss already carries its whole factor. Norm and clip are ours, one formula:
every rank adds ‖g‖² / replicas of what it steps, one all-reduce over the world, so that no rank can hold another number.
(Core's own norm counts expert gradients wrongly when ETP differs from TP, and may differ between ranks.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mm_models.layout import ParallelLayout
from mm_models.mcore.local_grads import LocalGradients
from mm_models.train import norm as norms
from mm_models.train.norm import world_norm

EMBEDDING, HEAD = "text_decoder.embedding.word_embeddings.weight", "text_decoder.output_layer.weight"


class Stepped(Protocol):
    """A piece of a parameter that this rank steps: `mcore.optimizer.Shard`. `main.grad` is its fp32 gradient."""

    param: torch.nn.Parameter
    main: torch.Tensor


def finalize(chunks: list, num_tokens=None, **unused) -> None:
    """Core's `finalize_model_grads_func`: sums over TP (replicated weights under sequence parallel), over the two copies of a tied
    weight, then over data-parallel ranks. The first two come first, so that any cut of the data-parallel shards is right.
    """
    for chunk in chunks:
        if isinstance(chunk, LocalGradients):
            chunk.collect()
    _sum_over_tp(chunks)
    _sum_tied(chunks)
    for chunk in chunks:
        chunk.finish_grad_sync()


def _sum_over_tp(chunks: list) -> None:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    grads = [
        p.main_grad
        for chunk in chunks
        for p in chunk.parameters()
        if p.requires_grad and getattr(p, "sequence_parallel", False)
    ]
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in same])
        dist.all_reduce(flat, group=group)
        for grad, summed in zip(same, flat.split([grad.numel() for grad in same])):
            grad.copy_(summed.view_as(grad))


def _sum_tied(chunks: list) -> None:
    """Embedding and head of a tied model that stand on two flat stages: each copy gets the sum of both gradients."""
    copies = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            name = name.removeprefix("module.")
            if name in (EMBEDDING, HEAD) and parameter.requires_grad:
                copies[name] = parameter
    if not copies or not _tied(chunks):
        return
    if len(copies) == 2:  # both on this rank, in different virtual chunks
        first, second = copies.values()
        second.main_grad.add_(first.main_grad)
        first.main_grad.copy_(second.main_grad)
    elif parallel_state.get_embedding_group().size() > 1:
        (parameter,) = copies.values()
        dist.all_reduce(parameter.main_grad, group=parallel_state.get_embedding_group())


def _tied(chunks: list) -> bool:
    """Whether the model is tied over two flat stages; the model says so itself, below any wrapper."""
    model = chunks[0]
    while hasattr(model, "module"):
        model = model.module
    split = model.split
    return model.model_config.tied and split.place("text_first") != split.place("text_last")


def replicas(param: torch.nn.Parameter, layout: ParallelLayout, *, distributed: bool) -> int:
    """On how many ranks the same gradient element is stepped. `distributed`: data-parallel ranks step disjoint pieces."""
    if not getattr(param, "allreduce", True):  # an expert: always sharded over its whole (ep, etp) grid
        return 1 if distributed else layout.edp
    data_parallel = 1 if distributed else layout.dp * layout.cp
    return data_parallel * (1 if getattr(param, "tensor_model_parallel", False) else layout.tp)


def grad_norm(chunks: list, pieces: Iterable[Stepped], layout: ParallelLayout) -> float:
    """The 2-norm of the whole gradient, the same number on every rank. Not finite where any gradient of any rank is not.

    `chunks` are DDP-wrapped; whether data-parallel ranks step disjoint pieces is read from them.
    """
    distributed = chunks[0].ddp_config.use_distributed_optimizer
    return world_norm(
        (piece.main.grad, replicas(piece.param, layout, distributed=distributed))
        for piece in pieces
        if piece.main.grad is not None and not getattr(piece.param, "shared", False)
    )


def clip(pieces: Sequence[Stepped], norm: float, limit: float) -> float:
    """Scale every gradient so that the norm is at most `limit`; `limit` 0 does nothing. Returns the factor."""
    return norms.clip((piece.main.grad for piece in pieces if piece.main.grad is not None), norm, limit)
