"""The pixels of a picture as a Hugging Face image processor makes them, without its copies.

A picture is resized as bytes; what the processor then does to a byte (rescale, normalise) is the same for every pixel of
a channel, so it is looked up in a table of 256 values that the processor's own methods have filled. The patches are laid
out while they are still bytes, a quarter of the size.

`PixelMaker` proves itself when it is made: a test picture gives the very bits that the processor gives, or the folder is
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mm_models.data.processor import grid_rule
from mm_models.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, int, int]
CHANNELS = 3
PROBE = (61, 83)
"""Height and width of the test picture: neither divides by a patch, so that it is resized."""


class PixelMaker:
    """Patches of pictures, for one processor."""

    def __init__(self, processor: Any):
        images = processor.image_processor
        self._grid, self._resample = grid_rule(processor), images.resample
        self._patch, self._merge, self._frames = images.patch_size, images.merge_size, images.temporal_patch_size
        self.features = CHANNELS * self._frames * self._patch**2
        """Values of a patch: (channel, frame, row, column)."""
        self._table = _table(images)
        self._prove(processor)

    def grid(self, image: Image) -> Grid:
        """What the picture takes; ValueError where the processor would refuse its shape."""
        return self._grid(image.height, image.width)

    def fill(self, out: Tensor, image: Image, grid: Grid) -> None:
        """Write the patches of an RGB picture to `out` (rows x columns of its `grid`, features), float32.

        Patches that merge into one token are neighbours; a still picture is its own next frame.
        """
        _, rows, columns = grid
        patch, merge = self._patch, self._merge
        image = image.resize((columns * patch, rows * patch), resample=self._resample)
        cut = np.asarray(image).reshape(rows // merge, merge, patch, columns // merge, merge, patch, CHANNELS)
        bytes_by_channel = np.ascontiguousarray(cut.transpose(6, 0, 3, 1, 4, 2, 5)).reshape(CHANNELS, -1, 1, patch**2)
        patches = out.numpy().reshape(-1, CHANNELS, self._frames, patch**2)
        for channel, values in enumerate(bytes_by_channel):
            # numpy stays in this thread: torch would share out these few milliseconds, and wait longer for the others
            patches[:, channel] = np.take(self._table[channel], values, mode="clip")

    def _prove(self, processor: Any) -> None:
        from PIL.Image import fromarray

        folder = processor.tokenizer.name_or_path
        if not processor.image_processor.do_resize:
            raise UserError(
                f"the image processor of {folder!r} has do_resize false: images would not fit their patches."
            )
        noise = torch.randint(256, (*PROBE, CHANNELS), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        image = fromarray(noise.numpy())
        grid = self.grid(image)
        ours = torch.empty(grid[1] * grid[2], self.features)
        self.fill(ours, image, grid)
        theirs = processor.image_processor(images=[image], return_tensors="pt")
        if theirs["image_grid_thw"].tolist() != [list(grid)] or not torch.equal(ours, theirs["pixel_values"]):
            raise UserError(
                f"the image processor of {folder!r} makes other pixels of a test picture than its settings say: "
                "they could not be trusted. Compare its preprocessor_config.json with the published one."
            )


def _table(images: Any) -> np.ndarray:
    """What the processor makes of a byte: (channel, byte), float32."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (CHANNELS, 1, 256))
    if images.do_rescale:
        values = images.rescale(values, images.rescale_factor)
    if images.do_normalize:
        values = images.normalize(values, images.image_mean, images.image_std)
    return np.array(values, dtype=np.float32).reshape(CHANNELS, 256)
