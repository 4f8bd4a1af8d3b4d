"""One optimizer step: forward and backward over the pipeline, reduction, norm, clip, AdamW, learning rate.

Loss, labelled tokens and gradient norm are agreed by all ranks, so every rank takes the same decision: an all-empty step is
skipped (counted, with the sample ids), a non-finite loss or norm stops the run naming step and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mm_models.mcore import grads
from mm_models.mcore.optimizer import Shard
from mm_models.mcore.session import Session
from mm_models.train import agree
from mm_models.train.batches import StepBatches, warn_empty


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `loss` and `grad_norm` are None when it was skipped; both are the same number on every rank."""

    loss: float | None
    grad_norm: float | None
    skipped: bool


def prepare_chunks(chunks: Sequence[torch.nn.Module]) -> None:
    """Hand core the hook that ends a step's backward pass. `chunks` are DDP-wrapped."""
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = grads.finalize


def train_step(
    session: Session,
    chunks: Sequence[torch.nn.Module],
    optimizer,
    scheduler,
    pieces: Sequence[Shard],
    step: StepBatches,
    forward_step: Callable,
) -> StepResult:
    """Run one step on this rank. Collective over the world."""
    warn_empty(step, speaks=session.speaks_for_loss, number=session.position.step)
    if step.empty:
        return StepResult(loss=None, grad_norm=None, skipped=True)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = _pipeline(session, chunks, step, forward_step)
    session.position.at("gradient norm")
    optimizer.prepare_grads()
    norm = grads.grad_norm(chunks, pieces, session.layout)
    if not math.isfinite(loss) or not math.isfinite(norm):
        _stop(session, pieces, loss, norm)
    grads.clip(pieces, norm, session.plan.args.clip_grad)
    session.position.at("optimizer step")
    optimizer.step_with_ready_grads()
    scheduler.step(increment=session.plan.global_batch_size)
    return StepResult(loss=loss, grad_norm=norm, skipped=False)


def evaluate_step(
    session: Session, chunks: Sequence[torch.nn.Module], step: StepBatches, forward_step: Callable
) -> float:
    """The loss of `step`, which trains nothing; the same on every rank. Collective over the world."""
    with torch.no_grad():
        return _pipeline(session, chunks, step, forward_step, forward_only=True)


def _pipeline(
    session: Session, chunks, step: StepBatches, forward_step: Callable, *, forward_only: bool = False
) -> float:
    """Forward, and backward, of every micro-batch over the pipeline: the step's loss, the same on every rank."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    cursors = step.cursors(len(chunks))
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=cursors if len(chunks) > 1 else cursors[0],
        model=list(chunks),
        num_microbatches=len(step.micro),
        seq_length=1,  # ignored: variable_seq_lengths sends every shape along
        micro_batch_size=1,
        forward_only=forward_only,
    )
    session.position.at("reducing the loss")
    here = sum(
        (report["lm loss"].double() for report in reported), torch.zeros((), dtype=torch.float64, device=session.device)
    )
    total = here if session.speaks_for_loss else torch.zeros_like(here)
    torch.distributed.all_reduce(total)
    return total.item()


def _stop(session: Session, pieces: Sequence[Shard], loss: float, norm: float) -> None:
    """Raise on every rank with the step, the loss or norm, and the ranks and parameters it came from."""
    session.position.at("naming a non-finite value")
    bad = [piece.name for piece in pieces if piece.main.grad is not None and not torch.isfinite(piece.main.grad).all()]
    agree.stop_non_finite(session.position.step, loss=loss, norm=norm, names=bad, rate="--lr")
