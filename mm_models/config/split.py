"""model.json with the layer lists of a stage split, and without any: `pipeline_num_layers` belong to one layout."""

from __future__ import annotations

from mm_models.config.model import ModelConfig
from mm_models.config.strict import validate
from mm_models.layout import ModelSplit


def with_split(model: ModelConfig, split: ModelSplit) -> ModelConfig:
    """`model` with the `pipeline_num_layers` of `split`: a flat list, or one list per virtual chunk."""
    content = model.model_dump(exclude_none=True)
    for section, part in (
        (content.get("image_encoder", {}).get("vision_encoder"), split.vision),
        (content.get("text_decoder"), split.text),
    ):
        if section is not None and part is not None:
            section["pipeline_num_layers"] = part.nested() if part.vpp > 1 else part.nested()[0]
    return validate(ModelConfig, content, "model.json")


def without_split(model: ModelConfig) -> ModelConfig:
    """`model` without `pipeline_num_layers`."""
    vision = model.image_encoder and model.image_encoder.model_copy(
        update={"vision_encoder": model.vision.model_copy(update={"pipeline_num_layers": None})}
    )
    text = model.text and model.text.model_copy(update={"pipeline_num_layers": None})
    return model.model_copy(update={"image_encoder": vision, "text_decoder": text})
