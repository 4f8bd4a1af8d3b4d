"""Parts of a patch-based vision tower: patch embedding, learned positions, downsampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PatchEmbed(nn.Module):
    """(patches, channels * t * p * p) pixels -> (patches, hidden), by a Conv3d whose kernel is its stride.

    Pixels are cast to the weight's dtype. The convolution stays one in fp32: a matmul differs by 1e-5 there.
    """

    def __init__(
        self, *, channels: int, temporal: int, patch: int, hidden: int, bias: bool, dtype: torch.dtype | None = None
    ):
        super().__init__()
        kernel = (temporal, patch, patch)
        self.shape = (-1, channels, *kernel)
        self.proj = nn.Conv3d(channels, hidden, kernel, stride=kernel, bias=bias, dtype=dtype)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight
        return self.proj(pixels.view(self.shape).to(weight.dtype)).view(-1, weight.shape[0])


class InterpolatedPositions(nn.Module):
    """A learned square table of positions, resampled bicubically to each image's own grid and added.

    `position_embedding.weight` (side², hidden). Sampling is `F.grid_sample` in fp32 at patch centres, border padding, as in
    Hugging Face; a grid of the table's own size gives the table's rows exactly.
    """

    def __init__(self, *, side: int, hidden: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.side = side
        self.position_embedding = nn.Embedding(side * side, hidden, dtype=dtype)

    def forward(self, x: torch.Tensor, grid_thw: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """(patches, hidden) + positions; `grid_thw` (N, 3), `position_ids` (patches, 2) rows and columns."""
        weight = self.position_embedding.weight
        table = weight.view(self.side, self.side, -1).permute(2, 0, 1).unsqueeze(0).float()
        size = grid_thw[:, 1:].repeat_interleave(grid_thw.prod(1), dim=0).float()  # (patches, 2) height, width
        # Written for rows and columns as Hugging Face writes it, so that every rounding is the same.
        rows = ((position_ids[:, 0] + 0.5) / size[:, 0]) * 2 - 1
        cols = ((position_ids[:, 1] + 0.5) / size[:, 1]) * 2 - 1
        grid = torch.stack((cols, rows), dim=-1).unsqueeze(0).unsqueeze(2)
        sampled = F.grid_sample(table, grid, mode="bicubic", align_corners=False, padding_mode="border")
        return x + sampled.squeeze(0).squeeze(-1).permute(1, 0).to(weight.dtype)


class Downsample(nn.Module):
    """(patches, hidden) -> (patches / merge², out): a Conv2d over each merge x merge block of patches.

    `weight` (out, hidden, merge, merge) and `bias` (out,) stand on the module itself, as Hugging Face names them.
    """

    def __init__(self, *, hidden: int, out: int, merge: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.merge = merge
        self.weight = nn.Parameter(torch.empty(out, hidden, merge, merge, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = x.view(-1, self.merge, self.merge, x.shape[-1]).permute(0, 3, 1, 2)
        return F.conv2d(blocks, self.weight, self.bias, stride=self.merge).view(-1, self.weight.shape[0])
