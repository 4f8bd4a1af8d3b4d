"""Putting image features among text tokens, with every count checked; and tensors that only have to be in the graph."""

from __future__ import annotations

import torch

from mm_models.errors import UserError


def place_features(
    embeddings: torch.Tensor, features: torch.Tensor, input_ids: torch.Tensor, image_token_id: int
) -> torch.Tensor:
    """(B, S, H) with `features` (n, H) in place of the n image tokens, in order."""
    mask = (input_ids == image_token_id).unsqueeze(-1).expand_as(embeddings)
    return embeddings.masked_scatter(mask, features.to(embeddings.dtype))


def check_image_tokens(
    input_ids: torch.Tensor, grid_thw: torch.Tensor | None, *, image_token_id: int, merge: int
) -> None:
    """Refuse a batch whose image tokens and image features do not belong together, naming the sample, the image and both numbers.

    `input_ids` (B, S); `grid_thw` (N, 3) or None: images in batch order. An image of (t, h, w) patches has t·h·w / merge² features.
    """
    sizes = [] if grid_thw is None else (grid_thw.prod(1) // merge**2).tolist()
    image = 0
    for sample, tokens in enumerate((input_ids == image_token_id).sum(1).tolist()):
        first, left = image, tokens
        while left > 0 and image < len(sizes) and sizes[image] <= left:
            left -= sizes[image]
            image += 1
        if left:
            given = (
                f"images {first}.. have {sizes[first : image + 1]} features" if sizes[first:] else "no image is left"
            )
            raise UserError(
                f"sample {sample} of the batch has {tokens} image tokens, but {given}: tokens and features must be equal."
            )
    if image < len(sizes):
        raise UserError(
            f"image {image} of the batch has {sizes[image]} features, but no image tokens are left for it (of {len(sizes)} images)."
        )


class _Join(torch.autograd.Function):
    """Identity for `x`; the received tensor gets a zero gradient. Not `x + received.sum() * 0`: an infinity would make it NaN."""

    @staticmethod
    def forward(ctx, x, received):
        ctx.received = received.shape, received.dtype, received.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        shape, dtype, device = ctx.received
        return grad, torch.zeros(shape, dtype=dtype, device=device)


def join(x: torch.Tensor, received: torch.Tensor | None) -> torch.Tensor:
    """`x`, with `received` in its graph."""
    return x if received is None else _Join.apply(x, received)
