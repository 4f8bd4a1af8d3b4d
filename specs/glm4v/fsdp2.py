"""GLM-4.1V on the FSDP2 target: GLM-4.5V's tower; the decoder is dense, rotates pairs of neighbours, and has gate and up as one.

The layer with its two further norms stays Hugging Face's.
"""

from __future__ import annotations

from functools import partial

from mm_models.fsdp2.assembly import Assembly, Replacement
from specs.parts import fsdp2 as parts

ASSEMBLY = Assembly(
    model_id="glm4v",
    hf_class="transformers:Glm4vForConditionalGeneration",
    replace=(
        *parts.whole("Glm4v", tower="Glm4vVisionModel"),
        *parts.glm_tower("Glm4v", mlp_class="Glm4VisionMlp"),
        Replacement(hf_class="Glm4vTextRotaryEmbedding", build=partial(parts.text_rotary, interleaved=True)),
        Replacement(hf_class="Glm4vTextAttention", build=partial(parts.text_attention, rotary="rotary_interleaved")),
        Replacement(hf_class="Glm4vTextMLP", build=parts.fused_mlp),
    ),
)
