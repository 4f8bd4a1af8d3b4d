"""GLM-4.5V on the Megatron target: one pure function per id, `(config, layout, stage, backend) -> ModuleSpec`.

No process group, no device, no weight is touched here. `*_layers` give the specs of the layers one stage holds, by global index;
the others wrap them into what `mcore.vlm_model` builds.
"""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer import ModuleSpec

from mm_models.components.vision import Downsample, InterpolatedPositions
from mm_models.config.sections import TextDecoderConfig, VisionEncoderConfig, VisionProjectorConfig
from mm_models.layout import ParallelLayout, Stage
from mm_models.mcore.layers import StackedAttention
from mm_models.mcore.projector import WholeMerger
from specs.parts import megatron as parts


def glm4v_vit(
    config: VisionEncoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The vision tower: Conv3d patches, bicubic learned positions, 2-D rotary, pre-norm blocks, 2 x 2 downsample."""
    hidden, merge = config.hidden_size, config.spatial_merge_size
    norm = parts.norm(hidden, config.eps, backend)
    return parts.tower(
        config,
        stage,
        glm4v_vit_layers(config, layout, stage, backend),
        patch_bias=True,
        final_layernorm=norm,
        parts={
            "post_conv_layernorm": norm,
            "embeddings": ModuleSpec(
                module=InterpolatedPositions, params={"side": config.image_size // config.patch_size, "hidden": hidden}
            ),
            "downsample": ModuleSpec(
                module=Downsample, params={"hidden": hidden, "out": config.out_hidden_size, "merge": merge}
            ),
        },
    )


def glm4v_vit_layers(
    config: VisionEncoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Tower layers of one stage."""
    attention = parts.attention(
        backend,
        "frames",
        module=StackedAttention,
        hidden=config.hidden_size,
        head_dim=config.head_dim,
        sequence_parallel=False,
    )
    mlp = parts.mlp(backend, hidden=config.hidden_size, ffn=config.ffn_hidden_size, sequence_parallel=False)
    norm = parts.norm(config.hidden_size, config.eps, backend)
    return {index: parts.layer(norm, attention, mlp) for index in stage.layers}


def glm_mlp(
    config: VisionProjectorConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The merger between tower and decoder, whole on every TP rank."""
    return ModuleSpec(
        module=WholeMerger, params={"size": config.out_hidden_size, "intermediate": config.intermediate_size}
    )


def glm4v_moe_lm(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The decoder's block of one stage."""
    return parts.decoder(config, layout, stage, backend, glm4v_moe_lm_layers(config, layout, stage, backend))


def glm4v_moe_lm_layers(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Decoder layers of one stage: the first `first_k_dense_replace` of the model dense, the rest MoE with a shared expert."""
    return parts.decoder_layers(config, layout, stage, backend)
