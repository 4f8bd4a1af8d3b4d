"""One optimizer step: forward and backward of every micro-batch, one gradient exchange, norm, clip, AdamW.

Loss, labelled tokens and gradient norm are agreed by all ranks, so every rank takes the same decision: an all-empty step is
skipped (counted, with the sample ids), a non-finite loss or norm stops the run naming step and ranks. Gradients are exchanged
in the backward pass of the last micro-batch alone, unless `defer_gradient_reduce` is false.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mm_models.fsdp2 import grads, sharding
from mm_models.fsdp2.optimizer import Optimizer
from mm_models.fsdp2.session import Session
from mm_models.train import agree
from mm_models.train.batches import StepBatches, warn_empty


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `loss`, `grad_norm` and `flops` (of all ranks) are None when it was skipped; each is the same number on
    every rank."""

    loss: float | None
    grad_norm: float | None
    skipped: bool
    flops: float | None = None


def train_step(
    session: Session, model: torch.nn.Module, optimizer: Optimizer, step: StepBatches, *, rate: float, flops: int
) -> StepResult:
    """Run one step on this rank at learning rate `rate`; `flops` is what this rank's part costs. Collective over the world."""
    warn_empty(step, speaks=True, number=session.position.step)
    if step.empty:
        return StepResult(loss=None, grad_norm=None, skipped=True)
    loss, all_flops = _forward_backward(session, model, step, flops)
    session.position.at("gradient norm")
    grads.fill_missing(model)
    norm = grads.norm(model)
    if not math.isfinite(loss) or not math.isfinite(norm):
        session.position.at("naming a non-finite value")
        agree.stop_non_finite(
            session.position.step, loss=loss, norm=norm, names=grads.non_finite(model), rate="training.lr"
        )
    grads.clip(model, norm, session.plan.config.training.clip_grad)
    session.position.at("optimizer step")
    optimizer.step(rate)
    return StepResult(loss=loss, grad_norm=norm, skipped=False, flops=all_flops)


def evaluate_step(session: Session, model: torch.nn.Module, step: StepBatches) -> float:
    """The loss of `step`, which trains nothing; the same on every rank. Collective over the world."""
    total = torch.zeros((), dtype=torch.float64, device=session.device)
    with torch.no_grad():
        for micro in step.micro:
            session.position.at("evaluating", micro_batch=micro.index)
            total += micro.loss(model(micro.data)).double()
    sharding.reshard(model)
    session.position.at("reducing the loss")
    torch.distributed.all_reduce(total)
    return total.item()


def _forward_backward(session: Session, model: torch.nn.Module, step: StepBatches, flops: int) -> tuple[float, float]:
    """The step's loss and the sum of `flops`, the same on every rank; gradients lie on the parameters."""
    total = torch.tensor([0.0, flops], dtype=torch.float64, device=session.device)
    exchanged_always = not session.plan.config.parallel.fsdp_plan.defer_gradient_reduce
    for micro in step.micro:
        sharding.exchange_gradients(model, exchanged_always or micro.index == len(step.micro) - 1)
        session.position.at("forward", micro_batch=micro.index)
        loss = micro.loss(model(micro.data))
        session.position.at("backward", micro_batch=micro.index)
        if (
            loss.requires_grad
        ):  # not of a text-only batch in one process when the tower alone trains: its gradient is zero
            loss.backward()
        total[0] += loss.detach().double()
    session.position.at("reducing the loss")
    torch.distributed.all_reduce(total)
    return tuple(total.tolist())
