"""M-RoPE position ids, one function per text decoder, registered in table `positions` under the decoder's `model_id`.

A position function turns a padded batch into three rows of positions (time, height, width):

    function(input_ids (B, S), attention_mask (B, S), image_grid_thw (images, 3) or None,
             *, image_token_id, spatial_merge_size) -> int64 (3, B, S)

Positions at padding are 0. Image grids are taken in the order in which images stand in the batch, row by row.
Refused: an image run whose length differs from its grid, and more or fewer runs than grids (index and both numbers).
"""

from __future__ import annotations

import torch
from torch import Tensor


def mrope(
    input_ids: Tensor,
    attention_mask: Tensor,
    image_grid_thw: Tensor | None,
    *,
    image_token_id: int,
    spatial_merge_size: int,
) -> Tensor:
    """For text and images equal to `get_rope_index` of transformers 5.24 of GLM-4.5V, GLM-4.1V, Qwen2-VL and Qwen2.5-VL.

    Text counts up by one in all three rows. An image of grid (t, h, w) starts at the running counter c and holds
    (c + time, c + row, c + column) over (t, h / merge, w / merge); the counter then moves on by max(h, w) / merge.
    """
    grids = [] if image_grid_thw is None else image_grid_thw.tolist()
    positions = torch.zeros(3, *input_ids.shape, dtype=torch.int64, device=input_ids.device)
    used = 0
    for row in range(input_ids.shape[0]):
        kept = attention_mask[row].bool()
        pieces, counter = [], 0
        for is_image, length in _runs(input_ids[row][kept] == image_token_id):
            if not is_image:
                pieces.append(torch.arange(counter, counter + length).expand(3, -1))
                counter += length
                continue
            if used == len(grids):
                raise ValueError(
                    f"batch row {row}: image {used} has tokens but no grid; the batch brings {len(grids)} grids."
                )
            time, height, width = grids[used]
            height, width = height // spatial_merge_size, width // spatial_merge_size
            if length != time * height * width:
                raise ValueError(
                    f"batch row {row}, image {used}: {length} image tokens, "
                    f"grid {tuple(grids[used])} needs {time * height * width}."
                )
            pieces.append(torch.cartesian_prod(*map(torch.arange, (time, height, width))).reshape(-1, 3).T + counter)
            counter += max(height, width)
            used += 1
        if pieces:
            positions[:, row, kept] = torch.cat(pieces, dim=1).to(positions.device)
    if used != len(grids):
        raise ValueError(f"the batch brings {len(grids)} image grids but only {used} images have tokens.")
    return positions


def _runs(flags: Tensor) -> list[tuple[bool, int]]:
    """Lengths of equal neighbours: [0, 0, 1] -> [(False, 2), (True, 1)]."""
    values, lengths = torch.unique_consecutive(flags, return_counts=True)
    return list(zip(values.tolist(), lengths.tolist(), strict=True))
