"""The order of samples: a function of (seed, epoch) alone.

Every rank computes the same order of the whole data set, cuts it into global batches, and takes its own rows of each:
micro-batch m of data-parallel rank r holds positions [(m * dp + r) * micro, + micro) of the global batch. So the
samples of a step do not depend on DP size, workers or PYTHONHASHSEED, and the whole state is one number,
`consumed_samples`.

Weights: with several files of weights, a file of n samples and weight w has round(n x w) places in an epoch: all of its
samples as often as that fills, and a part of them, drawn by (seed, epoch, file), once more. Without shuffle the files
come one after the other, each in its own order.

The tail: an epoch has total // global_batch_size global batches; samples left over are not used in that epoch, and the
next epoch is shuffled anew. Resuming with another global batch size recounts the position in epochs of the new length.

Refused: fewer samples than one global batch, a weight that leaves a file no place, and a global batch that micro-batch
times DP does not divide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from mm_models.errors import UserError


class BaseRandomBatchSampler:
    """Endless micro-batches (lists of indices) of one data-parallel rank, from `consumed_samples` on."""

    def __init__(
        self,
        total: int,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 1234,
        shuffle: bool = True,
        consumed_samples: int = 0,
        parts: Sequence[tuple[int, float]] | None = None,
    ):
        """`total` samples; `parts`: (samples, weight) of each file, in the order of the samples. Where weights are
        given, `self.total` is the number of places in an epoch."""
        self._parts = parts if parts and any(weight != 1 for _, weight in parts) else None
        if self._parts:
            total = sum(_places(*part) for part in self._parts)
        if global_batch_size % (micro_batch_size * dp_size):
            raise UserError(
                f"global batch {global_batch_size} does not divide by micro-batch {micro_batch_size} x "
                f"data parallel {dp_size} = {micro_batch_size * dp_size}."
            )
        if total < global_batch_size:
            raise UserError(
                f"{total} samples are fewer than one global batch of {global_batch_size}: no step could run. "
                "Lower the global batch, or give more rows."
            )
        self.total, self.consumed_samples = total, consumed_samples
        self._micro, self._global = micro_batch_size, global_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._seed, self._shuffle = seed, shuffle

    @property
    def samples_per_epoch(self) -> int:
        """Samples all ranks together use in one epoch; the rest is the tail."""
        return self.total // self._global * self._global

    @property
    def rule(self) -> str:
        """What the order depends on beside the seed."""
        weights = f", weights {', '.join(f'{weight:g}' for _, weight in self._parts)}" if self._parts else ""
        return ("shuffled" if self._shuffle else "in file order") + weights

    def __len__(self) -> int:
        """Micro-batches of this rank in one epoch."""
        return self.samples_per_epoch // (self._micro * self._dp_size)

    def order(self, epoch: int) -> list[int]:
        """The order of the whole data set in an epoch, the tail included."""
        samples = self._weighted(epoch) if self._parts else None
        if not self._shuffle:
            return samples or list(range(self.total))
        order = torch.randperm(self.total, generator=_generator(f"{self._seed}:{epoch}")).tolist()
        return [samples[place] for place in order] if samples else order

    def _weighted(self, epoch: int) -> list[int]:
        """The samples of an epoch in file order, each as often as its file's weight says."""
        found: list[int] = []
        first = 0
        for file, (size, weight) in enumerate(self._parts):
            copies, rest = divmod(_places(size, weight), max(size, 1))
            found += list(range(first, first + size)) * copies
            if rest:
                drawn = torch.randperm(size, generator=_generator(f"{self._seed}:{epoch}:{file}"))[:rest]
                found += sorted(first + index for index in drawn.tolist())
            first += size
        return found

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = divmod(self.consumed_samples, self.samples_per_epoch)
        while True:
            order = self.order(epoch)
            for batch in range(start, self.total - self._global + 1, self._global):
                for first in range(batch, batch + self._global, self._micro * self._dp_size):
                    first += self._dp_rank * self._micro
                    yield order[first : first + self._micro]
            epoch, start = epoch + 1, 0


def _places(size: int, weight: float) -> int:
    """How many places of an epoch a file fills."""
    places = round(size * weight)
    if size and not places:
        raise UserError(
            f"dataset_weights: weight {weight} of a file with {size} samples leaves it no place in an epoch."
        )
    return places


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


class SequentialBatchSampler(BaseRandomBatchSampler):
    """The same in file order; `shuffle` is refused by the schema."""


SAMPLERS = {"BaseRandomBatchSampler": BaseRandomBatchSampler, "SequentialBatchSampler": SequentialBatchSampler}
"""`dataloader_param.sampler_type`."""
