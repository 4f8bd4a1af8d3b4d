"""The order of samples: a function of (seed, epoch) alone.

Every rank computes the same order of the whole data set, cuts it into global batches, and takes its own rows of each:
micro-batch m of data-parallel rank r holds positions [(m * dp + r) * micro, + micro) of the global batch. So the
samples of a step do not depend on DP size, workers or PYTHONHASHSEED, and the whole state is one number,
`consumed_samples`.

The tail: an epoch has total // global_batch_size global batches; samples left over are not used in that epoch, and the
next epoch is shuffled anew. Resuming with another global batch size recounts the position in epochs of the new length.

Refused: fewer samples than one global batch, and a global batch that micro-batch times DP does not divide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

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
    ):
        if global_batch_size % (micro_batch_size * dp_size):
            raise UserError(
                f"global batch {global_batch_size} does not divide by micro-batch {micro_batch_size} x "
                f"data parallel {dp_size} = {micro_batch_size * dp_size}."
            )
        if total < global_batch_size:
            raise UserError(
                f"{total} samples are fewer than one global batch of {global_batch_size}: no step could run."
            )
        self.total, self.consumed_samples = total, consumed_samples
        self._micro, self._global = micro_batch_size, global_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._seed, self._shuffle = seed, shuffle

    @property
    def samples_per_epoch(self) -> int:
        """Samples all ranks together use in one epoch; the rest is the tail."""
        return self.total // self._global * self._global

    def __len__(self) -> int:
        """Micro-batches of this rank in one epoch."""
        return self.samples_per_epoch // (self._micro * self._dp_size)

    def order(self, epoch: int) -> list[int]:
        """The order of the whole data set in an epoch, the tail included."""
        if not self._shuffle:
            return list(range(self.total))
        digest = hashlib.sha256(f"{self._seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return torch.randperm(self.total, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = divmod(self.consumed_samples, self.samples_per_epoch)
        while True:
            order = self.order(epoch)
            for batch in range(start, self.total - self._global + 1, self._global):
                for first in range(batch, batch + self._global, self._micro * self._dp_size):
                    first += self._dp_rank * self._micro
                    yield order[first : first + self._micro]
            epoch, start = epoch + 1, 0


class SequentialBatchSampler(BaseRandomBatchSampler):
    """The same in file order; `shuffle` is refused by the schema."""


SAMPLERS = {"BaseRandomBatchSampler": BaseRandomBatchSampler, "SequentialBatchSampler": SequentialBatchSampler}
"""`dataloader_param.sampler_type`."""
