"""The GLM-4.5V family: `Glm4vMoeForConditionalGeneration` folders."""

from converters.glm4v_moe import projector, text, vision
from mm_models.config.config_map import ConfigMap, Field
from mm_models.config.family import Family

Glm4vMoeConverter = Family(
    name="Glm4vMoeConverter",
    model_id="glm4v_moe",
    model_types=("glm4v_moe",),
    ids={"vision_encoder": ("glm4v_vit",), "vision_projector": ("GlmMLP",), "text_decoder": ("glm4v_moe_lm",)},
    maps={"vision_encoder": vision.CONFIG, "vision_projector": projector.CONFIG, "text_decoder": text.CONFIG},
    prefixes={
        "vision_encoder": "model.visual.",
        "vision_projector": "model.visual.merger.",
        "text_decoder": "model.language_model.",
        "lm_head": "lm_head.",
    },
    root=ConfigMap(
        model_id="",
        section="",
        hf_section="",
        fields=(
            Field("img_context_token_id", "image_token_id", default=151363),
            Field("video_token_id", "video_token_id", default=151364),
            Field("vision_start_token_id", "image_start_token_id", default=151339),
        ),
    ),
    # The multi-token-prediction layer of GLM-4.5 stands behind the last decoder layer; transformers has no module for it.
    extras=(r"model\.language_model\.layers\.{num_layers}\..*",),
)
