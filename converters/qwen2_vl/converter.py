"""The Qwen2-VL family: `Qwen2VLForConditionalGeneration` folders."""

from converters.qwen2_vl import projector, text, vision
from mm_models.config.config_map import ConfigMap, Field
from mm_models.config.family import Family

PREFIXES = {
    "vision_encoder": "model.visual.",
    "vision_projector": "model.visual.merger.",
    "text_decoder": "model.language_model.",
    "lm_head": "lm_head.",
}
OLD_PREFIXES = {"vision_encoder": "visual.", "vision_projector": "visual.merger.", "text_decoder": "model."}
"""What published folders have, and what transformers writes unless told otherwise."""

ROOT = ConfigMap(
    model_id="",
    section="",
    hf_section="",
    fields=(
        Field("img_context_token_id", "image_token_id", default=151655),
        Field("video_token_id", "video_token_id", default=151656),
        Field("vision_start_token_id", "vision_start_token_id", default=151652),
    ),
)

Qwen2VLConverter = Family(
    name="Qwen2VLConverter",
    model_id="qwen2_vl",
    model_types=("qwen2_vl",),
    ids={
        "vision_encoder": ("qwen2vit", "qwen2_5_vit"),
        "vision_projector": ("lnmlp",),
        "text_decoder": ("qwen2lm", "qwen2_5_lm"),
    },
    maps={"vision_encoder": vision.CONFIG, "vision_projector": projector.CONFIG, "text_decoder": text.CONFIG},
    prefixes=PREFIXES,
    old_prefixes=OLD_PREFIXES,
    root=ROOT,
    fits=lambda model: model.vision is None or not model.vision.gated,
)
