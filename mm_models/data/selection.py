"""Which files and which of their rows a split has.

train   the rows of `dataset`, at most the first `max_samples` of all; with `val_rate` without the last share of each
        file's rows
valid   the rows of `val_dataset`; or, with `val_rate`, that last share: floor(rows x val_rate) of each file. At most
        the first `val_max_samples` of all

Refused: a file that is in both.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from mm_models.config.data import BasicParameters
from mm_models.data.files import RowFiles, find_files
from mm_models.errors import UserError


def split_paths(basic: BasicParameters, split: str) -> tuple[Path, ...]:
    """The files of a split, found."""
    if split == "valid" and basic.val_dataset is None and basic.val_rate is None:
        raise UserError(
            "val_dataset and val_rate are null: there is no validation split. Name a file in "
            "basic_parameters.val_dataset, or give val_rate the share of the rows to keep for it."
        )
    paths = find_files(basic.files, basic.dataset_dir)
    if split == "train" or basic.val_dataset is None:
        return paths
    own = find_files(basic.val_files, basic.dataset_dir)
    both = {path.resolve() for path in own} & {path.resolve() for path in paths}
    if both:
        raise UserError(
            f"val_dataset and dataset both name {', '.join(map(str, sorted(both)))}: validation would see rows that were "
            "trained on. Name another file, or give val_rate in place of val_dataset."
        )
    return own


def left_out(basic: BasicParameters, files: RowFiles, row: int) -> str | None:
    """Why training leaves out a row of all `files` of `dataset`, or None where it is the row itself that decides."""
    rows = len(files) if basic.max_samples is None else min(basic.max_samples, len(files))
    if row >= rows:
        return f"max_samples {basic.max_samples} takes rows 0-{rows - 1}"
    file = files.file_of(row)
    cut = _cut(range(files.starts[file], min(files.starts[file + 1], rows)), basic)
    return None if row < cut else f"val_rate {basic.val_rate} keeps it for validation"


def _cut(span: range, basic: BasicParameters) -> int:
    """Where the validation share of a file's rows begins."""
    return span.stop if basic.val_rate is None else span.stop - math.floor(len(span) * basic.val_rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Rows of several files."""

    files: RowFiles
    spans: tuple[range, ...]
    """Of each file, the rows that are meant, by their number through all files."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.spans))

    def __len__(self) -> int:
        return sum(self.sizes)

    def row(self, index: int) -> int:
        """The row number of the index-th row that is meant."""
        for span in self.spans:
            if index < len(span):
                return span[index]
            index -= len(span)
        raise IndexError(index)


def open_split(basic: BasicParameters, split: str) -> Selection:
    """The files and rows of a split."""
    paths = split_paths(basic, split)
    own_file = split == "valid" and basic.val_dataset is not None
    files = RowFiles.open(paths, limit=basic.val_max_samples if own_file else basic.max_samples)
    whole = [range(start, end) for start, end in zip(files.starts, files.starts[1:])]
    if own_file or basic.val_rate is None:
        return Selection(files=files, spans=tuple(whole))
    cuts = [_cut(span, basic) for span in whole]
    if split == "train":
        return Selection(
            files=files, spans=tuple(range(span.start, cut) for span, cut in zip(whole, cuts, strict=True))
        )
    spans, left = [], len(files) if basic.val_max_samples is None else basic.val_max_samples
    for span, cut in zip(whole, cuts, strict=True):
        spans.append(range(cut, min(span.stop, cut + left)))
        left -= len(spans[-1])
    if not any(spans):
        raise UserError(f"val_rate {basic.val_rate} of {' and '.join(map(str, files.sizes))} rows is no row.")
    return Selection(files=files, spans=tuple(spans))
