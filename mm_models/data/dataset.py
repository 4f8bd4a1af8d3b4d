"""A data set of conversations with images: every row is examined before training, and none disappears silently.

`ChatDataset` reads the file and examines each row (see `examine`). A row is then

    refused   the row or one of its images is wrong: one error lists all such rows, nothing is trained
    dropped   it is longer than `cutoff_len`, or has no answer to learn from: counted and listed in the report
    kept      one sample; its id is its row number

`cutoff_len` acts on whole samples: ids, images and positions always belong together. A data set in which nothing is
kept is refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data import rows
from mm_models.data.examine import Examiner
from mm_models.data.sample import Sample
from mm_models.data.templates.base import ChatTemplate
from mm_models.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What became of the rows: dropped ones and noteworthy ones, by reason."""

    path: Path
    rows: int
    kept: int
    tokens: int
    labelled: int
    images: int
    dropped: dict[str, list[int]]
    notes: dict[str, list[int]]

    def lines(self) -> list[str]:
        """For people; the first line always, then one per reason."""
        text = [
            f"data {self.path}: {self.kept} of {self.rows} rows, {self.tokens} tokens, "
            f"{self.labelled} of them trained, {self.images} images"
        ]
        for title, reasons in (("dropped", self.dropped), ("note", self.notes)):
            text += [
                f"data {title}: {reason}: {len(found)} rows: {rows.ranges(found)}"
                for reason, found in sorted(reasons.items())
            ]
        return text


class ChatDataset:
    """Samples by index, in the order of the file (`dataset_type: huggingface`)."""

    def __init__(
        self, config: DataConfig, processor: Any, template: ChatTemplate, *, split: str = "train", decode: bool = True
    ):
        """`split` is `train` (basic_parameters.dataset) or `valid` (val_dataset); `decode` opens every image fully."""
        basic = config.dataset_param.basic_parameters
        name, limit = {
            "train": (basic.dataset, basic.max_samples),
            "valid": (basic.val_dataset, basic.val_max_samples),
        }[split]
        if name is None:
            raise UserError(
                "val_dataset is null: there is no validation split. Name a file in basic_parameters.val_dataset."
            )
        examiner = Examiner(config, processor, template, base=basic.dataset_dir, decode=decode)
        path = rows.find_file(name, basic.dataset_dir)
        values = rows.read_rows(path)[:limit]
        self._samples: list[Sample] = []
        dropped: dict[str, list[int]] = {}
        notes: dict[str, list[int]] = {}
        faults: list[tuple[int, str]] = []
        for row, value in enumerate(values):
            outcome = examiner.examine(row, value)
            if outcome.fault:
                faults.append((row, outcome.fault))
                continue
            for note in outcome.notes:
                notes.setdefault(note, []).append(row)
            if outcome.dropped:
                dropped.setdefault(outcome.dropped, []).append(row)
            else:
                self._samples.append(outcome.sample)
        rows.refuse(path, len(values), faults)
        self.report = Report(
            path=path,
            rows=len(values),
            kept=len(self._samples),
            tokens=sum(len(sample.ids) for sample in self._samples),
            labelled=sum(sample.labelled for sample in self._samples),
            images=sum(len(sample.images) for sample in self._samples),
            dropped=dropped,
            notes=notes,
        )
        if not self._samples:
            raise UserError("\n".join([f"{path}: no sample is left of {len(values)} rows.", *self.report.lines()[1:]]))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def __getstate__(self) -> dict[str, Any]:
        """Workers need the samples alone."""
        return {"_samples": self._samples, "report": self.report}
