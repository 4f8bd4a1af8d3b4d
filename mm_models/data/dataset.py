"""A data set of conversations with images: every row is examined before training, and none disappears silently.

`ChatDataset` reads the file, tokenises each row, reads the header of each image and, with `decode`, decodes each image
once. A row is then

    refused   the row or one of its images is wrong: one error lists all such rows, nothing is trained
    dropped   it is longer than `cutoff_len`, or has no answer to learn from: counted and listed in the report
    kept      one sample; its id is its row number

`cutoff_len` acts on whole samples: ids, images and positions always belong together. A data set in which nothing is
kept is refused.
"""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data import images, rows
from mm_models.data.processor import image_grid
from mm_models.data.templates.base import ChatTemplate, Span
from mm_models.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One row, ready for the collator. Pixels are not decoded yet."""

    id: int
    ids: array
    """Token ids (int32), image tokens repeated."""
    trained: tuple[Span, ...]
    """Half-open ranges of `ids` whose tokens are labels."""
    images: tuple[Path, ...]
    grids: tuple[tuple[int, int, int], ...]

    @property
    def labelled(self) -> int:
        """Number of trained tokens."""
        return sum(end - start for start, end in self.trained)


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
        basic, attr = config.dataset_param.basic_parameters, config.dataset_param.attr
        name, limit = {
            "train": (basic.dataset, basic.max_samples),
            "valid": (basic.val_dataset, basic.val_max_samples),
        }[split]
        if name is None:
            raise UserError(
                "val_dataset is null: there is no validation split. Name a file in basic_parameters.val_dataset."
            )
        self._processor, self._template, self._base = processor, template, basic.dataset_dir
        self._decode, self._sizes = decode, {}
        path = rows.find_file(name, basic.dataset_dir)
        values = rows.read_rows(path)[:limit]
        self._samples: list[Sample] = []
        dropped: dict[str, list[int]] = {}
        notes: dict[str, list[int]] = {}
        faults: list[tuple[int, str]] = []
        for row, value in enumerate(values):
            try:
                sample, reason, remarks = self._examine(rows.parse_row(row, value, attr), basic.cutoff_len)
            except UserError as error:
                faults.append((row, str(error)))
                continue
            for remark in remarks:
                notes.setdefault(remark, []).append(row)
            if reason:
                dropped.setdefault(reason, []).append(row)
            else:
                self._samples.append(sample)
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

    def _examine(self, conversation: rows.Conversation, cutoff_len: int) -> tuple[Sample, str | None, tuple[str, ...]]:
        """(sample, why it is dropped or None, remarks)."""
        paths = tuple(images.resolve(image, self._base) for image in conversation.images)
        grids = tuple(map(self._grid, paths))
        merge = self._processor.image_processor.merge_size**2
        features = [time * height * width // merge for time, height, width in grids]
        encoded = self._template.encode(conversation.turns, features)
        sample = Sample(
            id=conversation.row, ids=array("i", encoded.ids), trained=encoded.trained, images=paths, grids=grids
        )
        found = sample.ids.count(self._processor.image_token_id)
        if found != sum(features):
            raise UserError(f"{found} image tokens, the images need {sum(features)}")
        if not encoded.answered:
            return sample, "no answer to learn from", encoded.notes
        if len(sample.ids) > cutoff_len:
            return sample, f"longer than cutoff_len {cutoff_len}", encoded.notes
        return sample, None, encoded.notes

    def _grid(self, path: Path) -> tuple[int, int, int]:
        if path not in self._sizes:
            self._sizes[path] = images.inspect(path, decode=self._decode)
        height, width = self._sizes[path]
        try:
            return image_grid(self._processor, height, width)
        except ValueError as error:
            raise UserError(f"image {str(path)!r}, {width} x {height}: {error}") from error
