"""A data set whose rows are examined when they are drawn: `preprocess_on_fly`, and `streaming` for files on disk.

Training starts at once and nothing is written. What is wrong with a row is only seen when it is drawn: a row that is
refused stops the run then, named by file and row; a row that would be dropped is replaced by the next kept one in the
order of the files, the first again after the last. So a sample depends on its index alone, and every rank sees the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data.examine import Examiner
from mm_models.data.report import Places
from mm_models.data.sample import Sample
from mm_models.data.selection import open_split
from mm_models.data.templates.base import ChatTemplate
from mm_models.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnReport:
    """What is known before rows are drawn."""

    places: Places
    rows: int
    images: int = 0
    """Not known."""
    remarks: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        return self.rows

    def summary(self) -> str:
        """As `Report.summary`, as far as it is known."""
        return f"{self.rows} rows, of files that begin at {', '.join(map(str, self.places.starts))}"

    def lines(self) -> list[str]:
        return [
            f"data {self.places.title}: {self.rows} rows, examined when they are drawn",
            "data a row that would be dropped is replaced by the next kept one; each is named the first time",
            *(f"data {remark}" for remark in self.remarks),
        ]


class DrawnDataset:
    """Samples by index, examined now."""

    def __init__(
        self, config: DataConfig, processor: Any, template: ChatTemplate, *, split: str = "train", decode: bool = True
    ):
        """`decode` is not asked for: images are decoded once, by the collator. With `on_broken_image: drop` they are
        decoded here too, on every rank."""
        basic = config.dataset_param.basic_parameters
        self._config, self._decode = config, basic.on_broken_image == "drop"
        self._rows = open_split(basic, split)
        places = Places(files=self._rows.files.paths, starts=self._rows.files.starts)
        idle = () if basic.cache_dir is None else ("cache_dir has no effect, nothing is written",)
        self.report = DrawnReport(places=places, rows=len(self._rows), remarks=idle)
        self.sizes = self._rows.sizes
        """Samples of each file."""
        self._examiner = Examiner(config, processor, template, base=basic.dataset_dir, decode=self._decode)
        self._named: set[int] = set()

    def __len__(self) -> int:
        return self.report.rows

    def __getstate__(self) -> dict[str, Any]:
        """A worker loads processor and template for itself."""
        return self.__dict__ | {"_examiner": None, "_named": set()}

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._examiner is None:
            self._examiner = Examiner.load(self._config, decode=self._decode)
        for step in range(len(self)):
            row = self._rows.row((index + step) % len(self))
            outcome = self._examiner.examine(row, self._rows.files.read(row))
            self._examiner.stamps.clear()
            if outcome.fault:
                raise UserError(f"{self.report.places.name(row)}: {outcome.fault}")
            if outcome.sample:
                return outcome.sample
            if row not in self._named:
                self._named.add(row)
                print(f"data dropped: {self.report.places.name(row)}: {outcome.dropped}", flush=True)
        raise UserError(f"{self.report.places.title}: no sample is left of {len(self)} rows.")
