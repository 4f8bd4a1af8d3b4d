"""The GLM-4.1V family: `Glm4vForConditionalGeneration` folders."""

from dataclasses import replace

from converters.glm4v import text
from converters.glm4v_moe.converter import Glm4vMoeConverter
from mm_models.config.config_map import Field

GlmConverter = replace(
    Glm4vMoeConverter,
    name="GlmConverter",
    model_id="glm4v",
    model_types=("glm4v",),
    ids={**Glm4vMoeConverter.ids, "text_decoder": ("glm4v_lm",)},
    maps={**Glm4vMoeConverter.maps, "text_decoder": text.CONFIG},
    root=replace(
        Glm4vMoeConverter.root,
        fields=(
            Field("img_context_token_id", "image_token_id", default=151343),
            Field("video_token_id", "video_token_id", default=151344),
            # Files of the field have the start of a video here. Nothing reads it, so it need not agree.
            Field("vision_start_token_id", "image_start_token_id", default=151339, compared=False),
        ),
    ),
    extras=(),
)
