"""What one row becomes: a sample, a row that is dropped with a reason, or a fault.

`Examiner.examine` tokenises the row, reads the header of each of its images and, with `decode`, decodes each image
once. It raises nothing for a row that is wrong: the caller decides when all faults are told.

A sample is never longer than `cutoff_len`, and ids, images and positions always belong together. Whole questions with
their answers and images are taken off the end of a longer one until it fits (noted); where the first one alone does not
fit, or with `cutoff: drop`, it is dropped. A sample without an answer to learn from is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_models.config.data import DataConfig
from mm_models.data import images, rows
from mm_models.data.images import ImageBytes
from mm_models.data.processor import image_grid, load_processor
from mm_models.data.rows import Turn
from mm_models.data.sample import Sample
from mm_models.data.stamps import Stamp, stamp
from mm_models.data.templates.base import ChatTemplate, Encoded
from mm_models.errors import UserError
from mm_models.registry import table

Grid = tuple[int, int, int]
KNOWN = 65536
"""How many image files an examiner remembers: data sets show one image in several rows."""


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
        self._attr, self._basic = config.dataset_param.attr, config.dataset_param.basic_parameters
        self._processor, self._template, self._base = processor, template, base
        first_frame = self._basic.on_animated_image == "first_frame"
        self._inspect = functools.partial(images.inspect, decode=decode, first_frame=first_frame)
        self._inspect_path = functools.lru_cache(KNOWN)(self._inspect)
        self.stamps: dict[Path, Stamp] = {}
        """The image files looked at, as they were just before; for a cache to see changes. The caller may clear it."""

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
        except images.ImageFault as fault:
            if self._basic.on_broken_image == "drop":
                return Outcome(row=row, dropped=f"{fault.kind} (on_broken_image)")
            return Outcome(row=row, fault=str(fault))
        except UserError as error:
            return Outcome(row=row, fault=str(error))

    def _examine(self, conversation: rows.Conversation) -> Outcome:
        row, limit, notes = conversation.row, self._basic.cutoff_len, conversation.notes
        sources = tuple(images.resolve(image, self._base) for image in conversation.images)
        grids = tuple(map(self._grid, sources))
        encoded = self._encode(conversation.turns, grids)
        if len(encoded.ids) > limit:
            encoded = self._cut(conversation.turns, grids) if self._basic.cutoff == "turns" else None
            if encoded is None:
                return Outcome(row=row, dropped=f"longer than cutoff_len {limit}", notes=notes)
            notes += (f"turns at the end left out to fit cutoff_len {limit}",)
        notes += encoded.notes
        if not encoded.answered:
            return Outcome(row=row, dropped="no answer to learn from", notes=notes)
        kept = encoded.images
        sample = Sample(
            id=row, ids=array("i", encoded.ids), trained=encoded.trained, images=sources[:kept], grids=grids[:kept]
        )
        return Outcome(row=row, sample=sample, notes=notes)

    def _cut(self, turns: Sequence[Turn], grids: Sequence[Grid]) -> Encoded | None:
        """As many of the first questions with their answers as fit, found by halving; None where the first does not."""
        ends = [index + 2 for index, turn in enumerate(turns) if turn.role == "user"]
        found, fits, too_long = None, 0, len(ends)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            kept = turns[: ends[middle - 1]]
            encoded = self._encode(kept, grids[: sum(turn.text.count(rows.IMAGE_MARK) for turn in kept)])
            if len(encoded.ids) > self._basic.cutoff_len:
                too_long = middle
            else:
                found, fits = encoded, middle
        return found

    def _encode(self, turns: Sequence[Turn], grids: Sequence[Grid]) -> Encoded:
        merge = self._processor.image_processor.merge_size**2
        features = [time * height * width // merge for time, height, width in grids]
        encoded = self._template.encode(turns, features)
        found = encoded.ids.count(self._processor.image_token_id)
        if found != sum(features):
            raise UserError(f"{found} image tokens, the images need {sum(features)}")
        return encoded

    def _grid(self, source: Path | ImageBytes) -> Grid:
        if isinstance(source, Path) and source not in self.stamps:
            self.stamps[source] = stamp(source)
        inspect = self._inspect_path if isinstance(source, Path) else self._inspect
        height, width = inspect(source)
        try:
            return image_grid(self._processor, height, width)
        except ValueError as error:
            raise images.fault(source, f"{width} x {height}: {error}.", kind="extreme shape") from error


def make_processor(config: DataConfig) -> Any:
    """The Hugging Face processor of data.json, with its pixel bounds."""
    preprocess = config.dataset_param.preprocess_parameters
    processor = load_processor(
        preprocess.model_name_or_path,
        image_min_pixels=preprocess.image_min_pixels,
        image_max_pixels=preprocess.image_max_pixels,
    )
    if not preprocess.use_fast_tokenizer:
        raise UserError(
            f"use_fast_tokenizer is false: {type(processor.tokenizer).__name__} of {preprocess.model_name_or_path!r} "
            "has no slow form in this transformers. Set it to true."
        )
    return processor


def make_template(config: DataConfig, processor: Any) -> ChatTemplate:
    """The template data.json names, proven against the processor's own."""
    basic = config.dataset_param.basic_parameters
    template = table("templates").get(basic.template)(
        processor,
        name=basic.template,
        enable_thinking=basic.enable_thinking,
        mask_history=basic.mask_history,
        train_on_prompt=basic.train_on_prompt,
    )
    tokenizer = processor.tokenizer
    ends = {template.end_token, tokenizer.eos_token}
    if not config.dataloader_param.collate_param.ignore_pad_token_for_loss and tokenizer.pad_token in ends:
        raise UserError(
            f"ignore_pad_token_for_loss is false, and the pad token {tokenizer.pad_token} of "
            f"{tokenizer.name_or_path!r} also ends a text: at padding it would be trained as an end. "
            "Set it to true."
        )
    return template
