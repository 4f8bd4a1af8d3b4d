"""What one row becomes: a sample, a row that is dropped with a reason, or a fault.

`Examiner.examine` tokenises the row, reads the header of each of its images and, with `decode`, decodes each image
once. It raises nothing for a row that is wrong: the caller decides when all faults are told.
"""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data import images, rows
from mm_models.data.processor import image_grid, load_processor
from mm_models.data.sample import Sample
from mm_models.data.templates.base import ChatTemplate
from mm_models.errors import UserError
from mm_models.registry import table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exactly one of `sample`, `dropped` and `fault` is set."""

    row: int
    sample: Sample | None = None
    dropped: str | None = None
    """Why the row is not a sample; it is counted and listed."""
    fault: str | None = None
    """What is wrong with the row; nothing is trained."""
    notes: tuple[str, ...] = ()
    """What the reader of the report should know."""


class Examiner:
    """Examines rows by one data.json."""

    def __init__(self, config: DataConfig, processor: Any, template: ChatTemplate, *, base: str, decode: bool):
        """`base` is the folder of relative image paths; `decode` opens every image fully."""
        self._attr = config.dataset_param.attr
        self._cutoff = config.dataset_param.basic_parameters.cutoff_len
        self._processor, self._template, self._base = processor, template, base
        self._decode, self._sizes = decode, {}

    @classmethod
    def load(cls, config: DataConfig, *, decode: bool) -> Examiner:
        """With processor and template made from the folder that data.json names."""
        basic = config.dataset_param.basic_parameters
        processor = make_processor(config)
        return cls(config, processor, make_template(config, processor), base=basic.dataset_dir, decode=decode)

    def examine(self, row: int, value: Any) -> Outcome:
        """Row number `row` with the value the file has there."""
        try:
            return self._examine(rows.parse_row(row, value, self._attr))
        except UserError as error:
            return Outcome(row=row, fault=str(error))

    def _examine(self, conversation: rows.Conversation) -> Outcome:
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
        reason = None
        if not encoded.answered:
            reason = "no answer to learn from"
        elif len(sample.ids) > self._cutoff:
            reason = f"longer than cutoff_len {self._cutoff}"
        return Outcome(row=conversation.row, sample=None if reason else sample, dropped=reason, notes=encoded.notes)

    def _grid(self, path: Path) -> tuple[int, int, int]:
        if path not in self._sizes:
            self._sizes[path] = images.inspect(path, decode=self._decode)
        height, width = self._sizes[path]
        try:
            return image_grid(self._processor, height, width)
        except ValueError as error:
            raise UserError(f"image {str(path)!r}, {width} x {height}: {error}") from error


def make_processor(config: DataConfig) -> Any:
    """The Hugging Face processor of data.json, with its pixel bounds."""
    preprocess = config.dataset_param.preprocess_parameters
    return load_processor(
        preprocess.model_name_or_path,
        image_min_pixels=preprocess.image_min_pixels,
        image_max_pixels=preprocess.image_max_pixels,
    )


def make_template(config: DataConfig, processor: Any) -> ChatTemplate:
    """The template data.json names, proven against the processor's own."""
    basic = config.dataset_param.basic_parameters
    return table("templates").get(basic.template)(
        processor, name=basic.template, enable_thinking=basic.enable_thinking, mask_history=basic.mask_history
    )
