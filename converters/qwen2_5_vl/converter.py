"""The Qwen2.5-VL family: `Qwen2_5_VLForConditionalGeneration` folders. Only the tower differs from Qwen2-VL's."""

from dataclasses import replace

from converters.qwen2_5_vl import vision
from converters.qwen2_vl.converter import Qwen2VLConverter
from converters.qwen2_vl.projector import config_map

Qwen2_5_VLConverter = replace(
    Qwen2VLConverter,
    name="Qwen2_5_VLConverter",
    model_id="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    ids={**Qwen2VLConverter.ids, "text_decoder": ("qwen2_5_lm", "qwen2lm")},
    maps={
        **Qwen2VLConverter.maps,
        "vision_encoder": vision.CONFIG,
        "vision_projector": config_map("hidden_size", "out_hidden_size", "RMSNorm", default=3584),
    },
    fits=lambda model: model.vision is None or model.vision.gated,
)
