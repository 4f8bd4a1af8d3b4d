"""One step's micro-batches: read once, counted once, handed to every virtual chunk.

Core's interleaved schedule takes one iterator per chunk and wants the same micro-batches from each; `StepBatches.cursors`
gives them. Before the first forward the labelled tokens of the whole global batch are known (one all-reduce), so that each
micro-batch carries the divisors that make its summed cross entropy its final share of the loss:

    per_token_loss   sum of CE / labelled tokens of the step
    default          sum of CE / labelled tokens of the micro-batch / non-empty micro-batches of the step
    raw              the loss of Hugging Face's model for each micro-batch, its mean over labelled tokens, averaged over the non-empty
                     micro-batches: for models that leave the loss to cross entropy, default's own divisors

Gradients are only ever summed afterwards. A micro-batch without labels contributes zero and is not counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mm_models.components.loss import count_labels
from mm_models.errors import unknown_name

LOSS_TYPES = ("default", "per_token_loss", "raw")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch as the collator made it, with what its summed loss is divided by. `tokens` is 1 where there is none."""

    index: int
    data: dict[str, Any]
    tokens: int
    parts: int

    def loss(self, summed: Tensor) -> Tensor:
        """This micro-batch's share of the step's loss. Two divisions, not a factor: the first is Hugging Face's own arithmetic."""
        loss = summed / self.tokens
        return loss / self.parts if self.parts > 1 else loss


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """The micro-batches of one step on this rank, and what is known of the whole step: labelled tokens, non-empty micro-batches,
    and all its tokens with padding."""

    micro: tuple[MicroBatch, ...]
    tokens: int
    parts: int
    all_tokens: int

    @property
    def empty(self) -> bool:
        """Whether no sample of the global batch has a label: there is no loss to compute."""
        return self.tokens == 0

    @property
    def sample_ids(self) -> list[int]:
        return [id for micro in self.micro for id in micro.data["sample_ids"]]

    def undivided(self) -> StepBatches:
        """The same micro-batches, each with its summed cross entropy as its loss."""
        return replace(self, micro=tuple(replace(micro, tokens=1, parts=1) for micro in self.micro))

    def cursors(self, chunks: int) -> list[Iterator[MicroBatch]]:
        """One iterator over the same micro-batches for each virtual chunk."""
        return [iter(self.micro) for _ in range(chunks)]


def gather_step(
    loader: Iterator[dict[str, Any]], *, count: int, loss_type: str, counts: bool, device: torch.device
) -> StepBatches:
    """Read `count` micro-batches and agree on the loss divisors with all ranks.

    `counts` says whether this rank's labels enter the sum: true on exactly one rank of each model-parallel group (the first
    tensor-parallel rank of the last stage), which also holds the labels. A collective over the world.
    """
    read = [move(next(loader), device) for _ in range(count)]
    here = [count_labels(data["labels"]) if "labels" in data else 0 for data in read]
    size = sum(data["labels"].numel() for data in read if "labels" in data)
    total = torch.tensor([sum(here), sum(n > 0 for n in here), size], dtype=torch.int64, device=device)
    if not counts:
        total.zero_()
    torch.distributed.all_reduce(total)
    tokens, parts, all_tokens = total.tolist()
    if loss_type not in LOSS_TYPES:
        raise unknown_name("loss type", loss_type, LOSS_TYPES)
    per_token = loss_type == "per_token_loss"
    micro = tuple(
        MicroBatch(
            index=index, data=data, tokens=max(1, tokens if per_token else n), parts=1 if per_token else max(1, parts)
        )
        for index, (data, n) in enumerate(zip(read, here, strict=True))
    )
    return StepBatches(micro=micro, tokens=tokens, parts=parts, all_tokens=all_tokens)


def move(data: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors of a batch on `device`."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in data.items()}


def empty_ids(step: StepBatches) -> list[int]:
    """Sample ids of this rank's micro-batches that have no label at all."""
    return [
        id
        for micro in step.micro
        if "labels" in micro.data and count_labels(micro.data["labels"]) == 0
        for id in micro.data["sample_ids"]
    ]


def warn_empty(step: StepBatches, *, speaks: bool, number: int) -> None:
    """Name the samples of step `number` without any label. When a whole step is empty all ranks gather them for one line.

    `speaks`: whether this rank's labels enter the loss.
    """
    mine = empty_ids(step) if speaks else []
    if step.empty:
        found: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, mine)
        if torch.distributed.get_rank() == 0:
            ids = sorted(id for part in found for id in part)
            print(
                f"WARNING step {number}: no labelled token in the whole global batch, step skipped; samples {ids}",
                flush=True,
            )
    elif mine:
        print(f"WARNING step {number}: no labelled token in samples {mine}; they are left out of the loss", flush=True)


def fingerprint(sample_ids: Sequence[int]) -> int:
    """A 62-bit hash of the ids in order, the same in every process."""
    digest = hashlib.blake2b(",".join(map(str, sample_ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def check_same_samples(
    sample_ids: Sequence[int], *, group: torch.distributed.ProcessGroup, device: torch.device, step: int
) -> None:
    """Refuse ranks of one model-parallel group that hold different samples. One all-reduce when all is well."""
    mine = fingerprint(sample_ids)
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=group)
    if extremes[0] == -extremes[1]:
        return
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, (torch.distributed.get_rank(), list(sample_ids)), group=group)
    lines = "; ".join(f"rank {rank}: {ids}" for rank, ids in found)
    raise RuntimeError(f"step {step}: ranks of one model-parallel group were given different samples ({lines}).")
