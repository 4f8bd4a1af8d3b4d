"""Image tokens against features: every mismatch is refused with the sample, the image and both numbers."""

from __future__ import annotations

import pytest
import torch

from mm_models.components.multimodal import check_image_tokens, place_features
from mm_models.errors import UserError

IMAGE = 9


def ids(*counts: int) -> torch.Tensor:
    return torch.stack([torch.tensor([IMAGE] * n + [1] * (40 - n)) for n in counts])


def grid(*sizes: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([(1, h, w) for h, w in sizes])


def test_matching_counts_pass():
    check_image_tokens(ids(4, 0, 10), grid((4, 4), (4, 6), (4, 4)), image_token_id=IMAGE, merge=2)
    check_image_tokens(ids(0), None, image_token_id=IMAGE, merge=2)


@pytest.mark.parametrize(
    "tokens,images,message",
    [
        ((4, 5), grid((4, 4), (4, 4)), r"sample 1 of the batch has 5 image tokens, but images 1.. have \[4\] features"),
        ((3,), grid((4, 4)), r"sample 0 of the batch has 3 image tokens, but images 0.. have \[4\] features"),
        ((4, 4), grid((4, 4)), "sample 1 of the batch has 4 image tokens, but no image is left"),
        ((4,), grid((4, 4), (4, 6)), "image 1 of the batch has 6 features, but no image tokens are left"),
        ((2,), None, "sample 0 of the batch has 2 image tokens, but no image is left"),
    ],
)
def test_mismatches_are_refused(tokens, images, message):
    with pytest.raises(UserError, match=message):
        check_image_tokens(ids(*tokens), images, image_token_id=IMAGE, merge=2)


def test_features_go_to_their_places_in_order():
    embeddings, features = torch.zeros(2, 5, 3), torch.arange(1.0, 10.0).view(3, 3)
    tokens = torch.tensor([[1, IMAGE, 1, IMAGE, 1], [IMAGE, 1, 1, 1, 1]])
    out = place_features(embeddings, features, tokens, IMAGE)
    assert (
        torch.equal(out[0, 1], features[0])
        and torch.equal(out[0, 3], features[1])
        and torch.equal(out[1, 0], features[2])
    )
    assert out.abs().sum() == features.sum()
