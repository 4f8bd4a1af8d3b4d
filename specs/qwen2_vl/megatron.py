"""Qwen2-VL and Qwen2.5-VL on the Megatron target: one pure function per id, `(config, layout, stage, backend) -> ModuleSpec`.

The two differ in configuration alone: norm, MLP and windows of the tower, norm of the projector.
"""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer import ModuleSpec

from mm_models.config.sections import TextDecoderConfig, VisionEncoderConfig, VisionProjectorConfig
from mm_models.layout import ParallelLayout, Stage
from mm_models.mcore.projector import NormMLP, NormMLPSubmodules
from specs.parts import megatron as parts


def qwen2vit(
    config: VisionEncoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The vision tower: Conv3d patches, 2-D rotary, pre-norm blocks, biases; the projector merges its patches."""
    layers = qwen2vit_layers(config, layout, stage, backend)
    return parts.tower(config, stage, layers, patch_bias=False, window=config.window_attn_size)


def qwen2vit_layers(
    config: VisionEncoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Tower layers of one stage. With windows all attend inside them but `fullatt_block_indexes`, which count through the model."""
    whole = parts.tower_attention(config, backend, "frames")
    windows = parts.tower_attention(config, backend, "windows")
    mlp = parts.mlp(
        backend,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        activation="swiglu" if config.gated else config.activation_func,
        gated=config.gated,
        bias=True,
        sequence_parallel=False,
    )
    norm = parts.norm(config.hidden_size, config.eps, backend, kind=config.normalization)
    framed = stage.layers if config.window_attn_size is None else config.fullatt_block_indexes
    return {index: parts.layer(norm, whole if index in framed else windows, mlp) for index in stage.layers}


def lnmlp(
    config: VisionProjectorConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The projector: a norm on each patch, then a plain MLP on merged patches, split over TP."""
    merged = config.ffn_hidden_size
    return ModuleSpec(
        module=NormMLP,
        params={"merged": merged},
        submodules=NormMLPSubmodules(
            layernorm=parts.norm(config.input_size, config.layernorm_epsilon, backend, kind=config.normalization),
            encoder=parts.mlp(
                backend,
                hidden=merged,
                ffn=merged,
                out=config.hidden_size,
                activation=config.activation_func,
                gated=False,
                bias=True,
                sequence_parallel=False,
            ),
        ),
    )


def qwen2lm(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The decoder's block of one stage."""
    return parts.decoder(config, layout, stage, backend, qwen2lm_layers(config, layout, stage, backend))


def qwen2lm_layers(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Decoder layers of one stage, all dense."""
    return parts.decoder_layers(config, layout, stage, backend)
