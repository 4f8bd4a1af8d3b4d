"""GLM-4.1V on the Megatron target: GLM-4.5V's tower and merger, and a dense decoder with interleaved M-RoPE and sandwich norms."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer import ModuleSpec

from mm_models.config.sections import TextDecoderConfig
from mm_models.layout import ParallelLayout, Stage
from specs.parts import megatron as parts


def glm4v_lm(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> ModuleSpec:
    """The decoder's block of one stage."""
    return parts.decoder(config, layout, stage, backend, glm4v_lm_layers(config, layout, stage, backend))


def glm4v_lm_layers(
    config: TextDecoderConfig, layout: ParallelLayout, stage: Stage, backend: BackendSpecProvider
) -> dict[int, ModuleSpec]:
    """Decoder layers of one stage: a norm before and after attention and MLP."""
    return parts.decoder_layers(config, layout, stage, backend, post_norms=True)
