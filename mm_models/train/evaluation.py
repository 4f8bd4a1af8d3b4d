"""Evaluation of the validation split: when, over which samples, and what its loss is.

After every `eval_interval` iterations and after the last of the run, the first `eval_iters` global batches of the split (all its
whole ones by default), in the order of its files from its first sample, each time the same. The loss is a token's: the sum of
the cross entropies of all their trained tokens divided by the number of these, whatever `loss_type` is. So it depends on the
samples alone, where `default` and `raw` in training also depend on the size of a micro-batch.

Training does not notice: no gradients, no dropout, nothing drawn from its random states, a loader apart. A run resumed evaluates
at the same iterations, since only their number decides; a run that a signal stops saves and leaves without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_models.config.data import BasicParameters, DataConfig
from mm_models.data.selection import split_paths
from mm_models.errors import UserError

if TYPE_CHECKING:
    import torch

    from mm_models.data.loader import Loader

Option = Callable[[str], str]
"""`eval_interval` as the user spells it to this target."""


def planned(data: DataConfig, *, interval: int | None, option: Option) -> list[str]:
    """What a run says of its validation split before it starts; a `UserError` where it shall evaluate and has none."""
    basic = data.dataset_param.basic_parameters
    if interval is not None:
        try:
            split_paths(basic, "valid")
        except UserError as error:
            raise UserError(f"{option('eval_interval')} {interval}: {error}") from error
    elif basic.val_dataset is not None or basic.val_rate is not None:
        return [f"validation: {_name(basic)} is not evaluated; {option('eval_interval')} asks for it"]
    return []


def open_split(build: Callable[..., Loader], data: DataConfig, *, option: Option) -> Loader:
    """`build(split="valid")`. What is wrong with the split, also that it is smaller than one global batch, names it."""
    try:
        return build(split="valid")
    except UserError as error:
        name = _name(data.dataset_param.basic_parameters)
        raise UserError(
            f"validation split, {name}: {error}\nIt is evaluated in whole global batches. Mend it, or drop {option('eval_interval')}."
        ) from error


def _name(basic: BasicParameters) -> str:
    return f"val_rate {basic.val_rate}" if basic.val_dataset is None else f"val_dataset {', '.join(basic.val_files)}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The split's `loader`, opened, and what a run does with it: `iters` global batches every `interval` iterations."""

    loader: Loader
    interval: int
    iters: int

    @classmethod
    def of(
        cls, loader: Loader, *, interval: int, iters: int | None, num_microbatches: int, option: Option
    ) -> Evaluation:
        """`num_microbatches` of a rank make one global batch."""
        whole = len(loader) // num_microbatches
        if (iters or whole) > whole:
            raise UserError(
                f"{option('eval_iters')} {iters}: the validation split has {whole} whole global batches. "
                "Set it to at most that, or drop it to evaluate them all."
            )
        return cls(loader=loader, interval=interval, iters=iters or whole)

    def lines(self) -> list[str]:
        """For the start of a run."""
        often = f"every {self.interval} iterations and after the last"
        found = [f"validation {line}" for line in self.loader.lines()]
        return [*found, f"validation: {often}, global batches: {self.iters}"]

    def due(self, iteration: int, train_iters: int) -> bool:
        return iteration % self.interval == 0 or iteration == train_iters

    def run(
        self, modules: Iterable[torch.nn.Module], sums: Callable[[Iterator[dict[str, Any]]], tuple[float, int]]
    ) -> tuple[float, int]:
        """(loss, trained tokens); nan where no token is trained. `sums` reads one global batch from this rank's micro-batches and
        returns the sum of its token losses and their number, of all ranks. Collective over the world."""
        modules, batches = list(modules), iter(self.loader)
        for module in modules:
            module.eval()
        found = [sums(batches) for _ in range(self.iters)]
        for module in modules:
            module.train()
        loss, tokens = map(sum, zip(*found, strict=True))
        return (loss / tokens if tokens else math.nan), tokens
