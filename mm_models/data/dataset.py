"""A data set of conversations with images: every row is examined before training, and none disappears silently.

`ChatDataset` examines each row (see `examine`). A row is then

    refused   the row or one of its images is wrong: one error lists all such rows, nothing is trained
    dropped   it cannot fit `cutoff_len`, or has no answer to learn from: counted and listed in the report
    kept      one sample; its id is its row number through all files

The samples lie in an Arrow file that every process maps into memory: in `cache_dir`, or in a temporary folder that goes
with the process. A data set in which nothing is kept is refused. With `preprocess_on_fly` or `streaming`,
`DrawnDataset` takes its place.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data import cache
from mm_models.data.drawn import DrawnDataset
from mm_models.data.examine import Examiner
from mm_models.data.preprocess import cores, preprocess
from mm_models.data.report import Counts, Places, Report
from mm_models.data.sample import Sample
from mm_models.data.selection import open_split, split_paths
from mm_models.data.stamps import Stamp
from mm_models.data.store import SampleStore
from mm_models.data.templates.base import ChatTemplate
from mm_models.errors import UserError


def open_dataset(
    config: DataConfig, processor: Any, template: ChatTemplate, *, split: str = "train", decode: bool = True
) -> ChatDataset | DrawnDataset:
    """The data set of `dataset_type: huggingface`."""
    basic = config.dataset_param.basic_parameters
    kind = DrawnDataset if basic.preprocess_on_fly or basic.streaming else ChatDataset
    return kind(config, processor, template, split=split, decode=decode)


class ChatDataset:
    """Samples by index, in the order of the files."""

    def __init__(
        self, config: DataConfig, processor: Any, template: ChatTemplate, *, split: str = "train", decode: bool = True
    ):
        """`split` is `train` or `valid` (see `selection`); `decode` opens every image fully. A cache, and
        `on_broken_image: drop`, always do: what is kept must not depend on the rank."""
        basic = config.dataset_param.basic_parameters
        decode = decode or basic.cache_dir is not None or basic.on_broken_image == "drop"
        examiner = Examiner(config, processor, template, base=basic.dataset_dir, decode=decode)
        build = functools.partial(_build, config, examiner, split, decode)
        paths = split_paths(basic, split)
        self._folder, remarks = None, []
        if basic.cache_dir is not None:
            key = cache.key(config, paths, split=split)
            found = cache.open_or_build(Path(basic.cache_dir), key, build, overwrite=basic.overwrite_cache)
            counts, samples = found.counts, found.samples
            if not found.built:
                remarks.append(f"was examined before: {samples}")
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="mm-data-")
            samples = Path(self._folder.name, "samples.arrow")
            counts, _ = build(samples)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if (basic.preprocessing_num_workers or 0) > cores():
            remarks.append(
                f"preprocessing_num_workers {basic.preprocessing_num_workers}: at most {cores()} processes, one a core"
            )
        if basic.cache_dir is None and ranks > 1:
            remarks.append(f"cache_dir is null: each of {ranks} ranks examines all rows for itself")
        places = Places(files=paths, starts=counts.starts)
        self.report = Report(places=places, counts=counts, remarks=tuple(remarks))
        self.sizes = counts.kept
        """Samples of each file."""
        self._samples = SampleStore(samples)
        if not self.report.kept:
            raise UserError(
                "\n".join([f"{places.title}: no sample is left of {counts.rows} rows.", *self.report.lines()[1:]])
            )

    def __len__(self) -> int:
        return self.report.kept

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._samples[index]

    def __getstate__(self) -> dict[str, Any]:
        """Workers need the samples alone; the folder belongs to this process."""
        return self.__dict__ | {"_folder": None}


def _build(
    config: DataConfig, examiner: Examiner, split: str, decode: bool, path: Path
) -> tuple[Counts, dict[Path, Stamp]]:
    selection = open_split(config.dataset_param.basic_parameters, split)
    return preprocess(config, selection, examiner=examiner, decode=decode, path=path)
