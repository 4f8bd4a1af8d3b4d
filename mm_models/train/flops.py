"""Floating-point operations of a training step, from the sizes in model.json and from what was computed.

Two operations for each multiply-add of a matrix product; norms, activations, rotary embedding and the optimizer are not counted. With
H hidden, n query heads and g key-value heads of d, F dense and I expert width, E experts of which each token visits k, J shared
width, V vocabulary, a decoder's forward pass is

    a token, each layer    2·H·d·(n + 2g)  +  2·n·d·H                         attention's projections
                           + 6·H·F   or   2·H·E + 6·H·I·k + 6·H·J             dense, or router, routed experts, shared experts
    a sequence of S        + 4·S²·n·d  each layer                             scores and their product with the values
    a token                + 2·H·V                                            head

Scores are counted whole though the mask leaves half of them, as the usual "6·N·D plus attention" does and as torch's counter. The vision
tower likewise per patch (two products without a gate), its attention within one frame of h·w patches or one window, and its
merger per merged token. Padding is computed,
so it is counted; what recompute runs again is not.

Backward: twice the forward, the gradients by inputs and by weights. Pixels need no gradient, a frozen part has none by weights, and
where nothing trains below it either, as in a frozen vision tower, none at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mm_models.config.model import ModelConfig
from mm_models.config.sections import TextDecoderConfig

Grid = tuple[int, int, int]


def training_flops(
    model: ModelConfig, *, sequences: Iterable[int], images: Iterable[Grid] = (), frozen: Collection[str] = ()
) -> int:
    """Forward and backward over `sequences` (tokens of each, image tokens and padding included) and `images` (t, h, w in patches).

    `frozen`: which of vision_encoder, vision_projector, text_decoder train nothing.
    """
    images = list(images)
    encoder_trains, projector_trains, decoder_trains = (
        part not in frozen for part in ("vision_encoder", "vision_projector", "text_decoder")
    )
    total = 0
    if model.vision and images:
        pixels, encoder, projector = _vision(model, images)
        total += (pixels * 2 + encoder * 3) if encoder_trains else pixels + encoder
        total += projector * (1 + encoder_trains + projector_trains)
    if model.text:
        below = decoder_trains or (bool(images) and (encoder_trains or projector_trains))
        for length in sequences:
            weights, scores = _sequence(model.text, length)
            total += weights * (1 + below + decoder_trains) + scores * (1 + 2 * below)
    return total


def batch_flops(model: ModelConfig, batch: Mapping[str, Any], *, frozen: Collection[str] = ()) -> int:
    """`training_flops` of one micro-batch as the collator makes it: `input_ids` (B, S), `image_grid_thw` (N, 3) if there are images."""
    size, length = batch["input_ids"].shape
    grids = batch.get("image_grid_thw")
    images = [] if grids is None else [tuple(grid) for grid in grids.tolist()]
    return training_flops(model, sequences=[length] * size, images=images, frozen=frozen)


def _sequence(text: TextDecoderConfig, length: int) -> tuple[int, int]:
    """Forward over one sequence of `length` tokens: products with weights, and of activations with each other."""
    hidden, width = text.hidden_size, text.num_attention_heads * text.kv_channels
    projections = 2 * hidden * (2 * width + 2 * text.num_query_groups * text.kv_channels)
    mlps = sum(_mlp(text, layer) for layer in range(text.num_layers))
    weights = text.num_layers * projections + mlps + 2 * hidden * text.vocab_size
    return length * weights, text.num_layers * 4 * length**2 * width


def _mlp(text: TextDecoderConfig, layer: int) -> int:
    """Of one token."""
    if not text.is_moe(layer):
        return 6 * text.hidden_size * text.ffn_hidden_size
    visited = text.moe_ffn_hidden_size * text.moe_router_topk + text.shared_ffn_hidden_size
    return 2 * text.hidden_size * text.num_moe_experts + 6 * text.hidden_size * visited


def _vision(model: ModelConfig, images: list[Grid]) -> tuple[int, int, int]:
    """Forward of the patch embedding, of the rest of the encoder with the product that merges patches, and of the projector."""
    vision = model.vision
    width, merge = vision.hidden_size, vision.spatial_merge_size**2
    patches = sum(t * h * w for t, h, w in images)
    scores = sum(
        length**2 for layer in range(vision.num_layers) for image in images for length in vision.segments(layer, image)
    )
    layer = patches * (8 * width**2 + 2 * (2 + vision.gated) * width * vision.ffn_hidden_size)
    pixels = patches * 2 * vision.patch_features * width
    encoder = vision.num_layers * layer + 4 * scores * width + patches * 2 * vision.merging_products
    return pixels, encoder, patches // merge * 2 * model.projector.products
