"""A request to stop, agreed by all ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import torch


class Signals:
    """SIGTERM and SIGINT as a request that all ranks agree on at the end of a step."""

    def __init__(self, numbers: Sequence[int] = (signal.SIGTERM, signal.SIGINT)):
        self._seen = 0
        for number in numbers:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame) -> None:
        self._seen = number

    def agreed(self, device: torch.device) -> int | None:
        """The signal any rank has received by now, on all ranks; None without one. A collective over the world."""
        seen = torch.tensor(self._seen, device=device)
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        return seen.item() or None
