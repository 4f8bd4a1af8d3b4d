"""Ids of weight maps, config maps and converters, as plain strings: listing them imports nothing."""

CATALOGUE = {
    "weight_maps": {
        "glm4v_vit": "converters.glm4v_moe.vision:WEIGHTS",
        "GlmMLP": "converters.glm4v_moe.projector:WEIGHTS",
        "glm4v_moe_lm": "converters.glm4v_moe.text:WEIGHTS",
    },
    "config_maps": {
        "glm4v_vit": "converters.glm4v_moe.vision:CONFIG",
        "GlmMLP": "converters.glm4v_moe.projector:CONFIG",
        "glm4v_moe_lm": "converters.glm4v_moe.text:CONFIG",
    },
    "converters": {
        "Glm4vMoeConverter": "converters.glm4v_moe.converter:Glm4vMoeConverter",
    },
}
