"""Samples -> one micro-batch, right-padded. A batch is a dict:

    sample_ids      list of B row numbers                        always
    input_ids       (B, S) int64, pads are the pad token         needs "ids"
    attention_mask  (B, S) int64, 1 at tokens, 0 at pads         needs "ids"
    position_ids    (3, B, S) int64, 0 at pads                   needs "positions"
    labels          (B, S) int64, not shifted, -100 = untrained  needs "labels"; with `train_on_pads` pads at pads
    image_grid_thw  (images, 3) int64, in patches                needs "grid", absent without images
    pixel_values    (patches, features) float32                  needs "pixels", absent without images

S is the longest sample of the batch, rounded up to `pad_to_multiple_of`. Only what is needed is built: images are
decoded for "pixels" alone. Positions come from the model's own rule, handed in, whichever collator id is named.
Refused: an image whose pixels do not give the grid its header promised (the file changed since the start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mm_models.components.loss import IGNORE
from mm_models.data import parcel
from mm_models.data.images import load_rgb
from mm_models.data.pixels import PixelMaker
from mm_models.data.sample import Sample, SampleError
from mm_models.errors import UserError

NEEDS = frozenset({"ids", "positions", "labels", "grid", "pixels"})

Batch = dict[str, Any]
Positions = Callable[..., Tensor]


class VisionLanguageCollator:
    """The collator, whichever of its names data.json has."""

    def __init__(
        self,
        *,
        processor: Any,
        positions: Positions | None,
        needs: frozenset[str] = NEEDS,
        pad_to_multiple_of: int = 1,
        train_on_pads: bool = False,
    ):
        """`processor` is Hugging Face's; `positions` a function of table `positions`, or None for a model without a text
        decoder."""
        if not needs <= NEEDS:
            raise UserError(f"collator needs {sorted(needs - NEEDS)}: unknown, expected some of {sorted(NEEDS)}.")
        if "positions" in needs and positions is None:
            raise UserError("collator needs positions, but the model has no text decoder.")
        self._pad, self._image_token = processor.tokenizer.pad_token_id, processor.image_token_id
        self._merge = processor.image_processor.merge_size
        self._positions, self._needs, self._multiple = positions, needs, pad_to_multiple_of
        self._pad_label = self._pad if train_on_pads else IGNORE
        self._pixels = PixelMaker(processor) if "pixels" in needs else None

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        batch: Batch = {"sample_ids": [sample.id for sample in samples]}
        grid = [grid for sample in samples for grid in sample.grids]
        grid = torch.tensor(grid, dtype=torch.int64) if grid else None
        if self._needs & {"ids", "positions"}:
            ids, mask = self._ids(samples)
        if "ids" in self._needs:
            batch |= {"input_ids": ids, "attention_mask": mask}
        if "positions" in self._needs:
            batch["position_ids"] = self._positions(
                ids, mask, grid, image_token_id=self._image_token, spatial_merge_size=self._merge
            )
        if "labels" in self._needs:
            batch["labels"] = self._labels(samples)
        if "grid" in self._needs and grid is not None:
            batch["image_grid_thw"] = grid
        if "pixels" in self._needs and grid is not None:
            batch["pixel_values"] = self._pixel_values(samples)
        return batch

    def _length(self, samples: Sequence[Sample]) -> int:
        longest = max(len(sample.ids) for sample in samples)
        return -(-longest // self._multiple) * self._multiple

    def _ids(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        shape = len(samples), self._length(samples)
        ids, mask = torch.full(shape, self._pad), torch.zeros(shape, dtype=torch.int64)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.ids)] = _tensor(sample)
            mask[row, : len(sample.ids)] = 1
        return ids, mask

    def _labels(self, samples: Sequence[Sample]) -> Tensor:
        labels = torch.full((len(samples), self._length(samples)), IGNORE)
        for row, sample in enumerate(samples):
            labels[row, len(sample.ids) :] = self._pad_label
            for start, end in sample.trained:
                labels[row, start:end] = _tensor(sample)[start:end]
        return labels

    def _pixel_values(self, samples: Sequence[Sample]) -> Tensor:
        images = [(sample.id, *image) for sample in samples for image in zip(sample.images, sample.grids, strict=True)]
        patches = [math.prod(grid) for _, _, grid in images]
        pixels = parcel.empty(sum(patches), self._pixels.features)
        for (row, source, grid), out in zip(images, pixels.split(patches), strict=True):
            try:
                image = load_rgb(source)
            except UserError as error:  # it was in order when the row was examined
                raise SampleError(row, str(error)) from error
            if (found := self._pixels.grid(image)) != grid:
                reason = f"image {str(source)!r}: its pixels give grid {found}, its header gave {grid} at the start"
                raise SampleError(row, f"{reason}; the file has changed.")
            self._pixels.fill(out, image, grid)
        return pixels


def _tensor(sample: Sample) -> Tensor:
    """The ids of a sample without a copy."""
    return torch.frombuffer(sample.ids, dtype=torch.int32)
