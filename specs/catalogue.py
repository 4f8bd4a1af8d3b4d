"""Ids of components and layer specs, as plain strings: listing them imports nothing."""

CATALOGUE = {
    "vision_encoders": {
        "glm4v_vit": "specs.glm4v_moe.megatron:glm4v_vit",
        "qwen2vit": "specs.qwen2_vl.megatron:qwen2vit",
        "qwen2_5_vit": "specs.qwen2_vl.megatron:qwen2vit",
    },
    "vit_layer_specs": {
        "glm4v_vit": "specs.glm4v_moe.megatron:glm4v_vit_layers",
        "qwen2vit": "specs.qwen2_vl.megatron:qwen2vit_layers",
        "qwen2_5_vit": "specs.qwen2_vl.megatron:qwen2vit_layers",
    },
    "vision_projectors": {
        "GlmMLP": "specs.glm4v_moe.megatron:glm_mlp",
        "lnmlp": "specs.qwen2_vl.megatron:lnmlp",
    },
    "text_decoders": {
        "glm4v_moe_lm": "specs.glm4v_moe.megatron:glm4v_moe_lm",
        "glm4v_lm": "specs.glm4v.megatron:glm4v_lm",
        "qwen2lm": "specs.qwen2_vl.megatron:qwen2lm",
        "qwen2_5_lm": "specs.qwen2_vl.megatron:qwen2lm",
    },
    "llm_layer_specs": {
        "glm4v_moe_lm": "specs.glm4v_moe.megatron:glm4v_moe_lm_layers",
        "glm4v_lm": "specs.glm4v.megatron:glm4v_lm_layers",
        "qwen2lm": "specs.qwen2_vl.megatron:qwen2lm_layers",
        "qwen2_5_lm": "specs.qwen2_vl.megatron:qwen2lm_layers",
    },
    "models": {
        "glm4v_moe": "specs.glm4v_moe.fsdp2:ASSEMBLY",
        "glm4v": "specs.glm4v.fsdp2:ASSEMBLY",
        "qwen2_vl": "specs.qwen2_vl.fsdp2:ASSEMBLY",
        "qwen2_5_vl": "specs.qwen2_5_vl.fsdp2:ASSEMBLY",
    },
}
