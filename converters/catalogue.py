"""Ids of sections of model.json, weight maps and converters, as plain strings: listing them imports nothing."""

CATALOGUE = {
    "sections": {
        "glm4v_vit": "converters.glm4v_moe.vision:GlmVision",
        "GlmMLP": "converters.glm4v_moe.projector:GlmProjector",
        "glm4v_moe_lm": "converters.glm4v_moe.text:GlmMoeText",
        "glm4v_lm": "converters.glm4v.text:GlmText",
        "qwen2vit": "converters.qwen2_vl.vision:QwenVision",
        "qwen2_5_vit": "converters.qwen2_vl.vision:QwenVision",
        "lnmlp": "converters.qwen2_vl.projector:LnMlp",
        "qwen2lm": "converters.qwen2_vl.text:QwenText",
        "qwen2_5_lm": "converters.qwen2_vl.text:QwenText",
    },
    "weight_maps": {
        "glm4v_vit": "converters.glm4v_moe.vision:WEIGHTS",
        "GlmMLP": "converters.glm4v_moe.projector:WEIGHTS",
        "glm4v_moe_lm": "converters.glm4v_moe.text:WEIGHTS",
        "glm4v_lm": "converters.glm4v.text:WEIGHTS",
        "qwen2vit": "converters.qwen2_5_vl.vision:WEIGHTS",
        "qwen2_5_vit": "converters.qwen2_5_vl.vision:WEIGHTS",
        "lnmlp": "converters.qwen2_vl.projector:WEIGHTS",
        "qwen2lm": "converters.qwen2_vl.text:WEIGHTS",
        "qwen2_5_lm": "converters.qwen2_vl.text:WEIGHTS",
    },
    "converters": {
        "Glm4vMoeConverter": "converters.glm4v_moe.converter:Glm4vMoeConverter",
        "GlmConverter": "converters.glm4v.converter:GlmConverter",
        "Qwen2VLConverter": "converters.qwen2_vl.converter:Qwen2VLConverter",
        "Qwen2_5_VLConverter": "converters.qwen2_5_vl.converter:Qwen2_5_VLConverter",
    },
}
