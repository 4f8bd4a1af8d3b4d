"""How far a run has come: what a checkpoint keeps beside weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Iterations done, samples consumed by all ranks, steps skipped. `rng` are the saved random states by data-parallel rank,
    None where there are none to restore."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    rng: tuple[Mapping, ...] | None = None
    data: str | None = None
    """The samples and their order in one line; None where the loader does not say."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken: what the learning-rate schedule counts."""
        return self.iteration - self.skipped

    def on(self, data: str | None) -> tuple[Progress, list[str]]:
        """The run on these samples, and what is to be told where they are not those of the run resumed."""
        told = []
        if self.data is not None and data != self.data:
            told = [
                f"data differ from the saved run: it had {self.data}; this has {data}. After {self.consumed_samples} samples "
                "the order goes on in the new one: some samples may come again in this epoch, others not at all"
            ]
        return replace(self, data=data), told

    def after(self, *, samples: int, skipped: bool) -> Progress:
        """One iteration further."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + samples,
            skipped=self.skipped + skipped,
            rng=None,
        )
