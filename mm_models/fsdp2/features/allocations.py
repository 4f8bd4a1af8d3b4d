"""Every allocation of tensor memory on the CPU while a block runs, in order: the peak and what led to it."""

from __future__ import annotations

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


class Allocations:
    """`with Allocations() as found: ...`, then `found.peak` and `found.events`. Bytes held before the block count as zero.

    Tensor memory alone: not RSS, which holds the libraries too. One at a time, and not beside another torch profiler.
    """

    def __init__(self):
        self.events: list[tuple[int, int, int]] = []
        """(nanoseconds since the start of the block, bytes taken or given back (negative), bytes held afterwards)."""

    def __enter__(self) -> Allocations:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._profile.__exit__(*exception)
        found = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        found.sort(key=lambda e: e.start_ns())
        held = accumulate(e.nbytes() for e in found)
        self.events = [(e.start_ns() - found[0].start_ns(), e.nbytes(), total) for e, total in zip(found, held)]
        del self._profile

    @property
    def peak(self) -> int:
        """Most bytes held at one time, beyond what was held before."""
        return max((total for _, _, total in self.events), default=0)
