"""Registry entries of the data layer: id -> "module:attribute", plain strings, so that listing them imports nothing."""

CATALOGUE: dict[str, dict[str, str]] = {
    "datasets": {
        "huggingface": "mm_models.data.dataset:open_dataset",
    },
    # `glm4.1v` and `qwen2vl` are the field's names, the others those of the models.
    "templates": {
        "glm4.1v": "mm_models.data.templates.glm4v:Glm4vTemplate",
        "glm4v": "mm_models.data.templates.glm4v:Glm4vTemplate",
        "glm4v_moe": "mm_models.data.templates.glm4v_moe:Glm4vMoeTemplate",
        "qwen2_vl": "mm_models.data.templates.qwen2vl:Qwen2VLTemplate",
        "qwen2vl": "mm_models.data.templates.qwen2vl:Qwen2VLTemplate",
    },
    # One collator under every name: positions come from the model's own rule, so `qwen3vl` with GLM gives GLM's.
    "collators": {
        id: "mm_models.data.collator:VisionLanguageCollator"
        for id in ("glm4.1v", "glm4v", "glm4v_moe", "qwen2_vl", "qwen2vl", "qwen3vl")
    },
    # And one rule for all of them, as long as samples hold images alone.
    "positions": {id: "mm_models.data.positions:mrope" for id in ("glm4v_lm", "glm4v_moe_lm", "qwen2_5_lm", "qwen2lm")},
}
