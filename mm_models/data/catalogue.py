"""Registry entries of the data layer: id -> "module:attribute", plain strings, so that listing them imports nothing."""

CATALOGUE: dict[str, dict[str, str]] = {
    "datasets": {
        "huggingface": "mm_models.data.dataset:ChatDataset",
    },
    "templates": {
        "glm4v_moe": "mm_models.data.templates.glm4v_moe:Glm4vMoeTemplate",
    },
    # One collator, two names: positions come from the model's own rule, so `qwen3vl` with GLM gives GLM's.
    "collators": {
        "glm4v_moe": "mm_models.data.collator:VisionLanguageCollator",
        "qwen3vl": "mm_models.data.collator:VisionLanguageCollator",
    },
    "positions": {
        "glm4v_moe_lm": "mm_models.data.positions:glm4v_moe",
    },
}
