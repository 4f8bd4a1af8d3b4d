"""One examined row, as the collator takes it."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

from mm_models.data.images import ImageBytes
from mm_models.data.templates.base import Span
from mm_models.errors import UserError


class SampleError(UserError):
    """What is wrong with a sample when it is used; `row` is its id."""

    def __init__(self, row: int, reason: str):
        super().__init__(f"row {row}, {reason}")
        self.row, self.reason = row, reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One row, ready for the collator. Pixels are not decoded yet."""

    id: int
    ids: array
    """Token ids (int32), image tokens repeated."""
    trained: tuple[Span, ...]
    """Half-open ranges of `ids` whose tokens are labels."""
    images: tuple[Path | ImageBytes, ...]
    grids: tuple[tuple[int, int, int], ...]

    @property
    def labelled(self) -> int:
        """Number of trained tokens."""
        return sum(end - start for start, end in self.trained)
