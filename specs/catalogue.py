"""Ids of components and layer specs, as plain strings: listing them imports nothing."""

CATALOGUE = {
    "vision_encoders": {"glm4v_vit": "specs.glm4v_moe.megatron:glm4v_vit"},
    "vision_projectors": {"GlmMLP": "specs.glm4v_moe.megatron:glm_mlp"},
    "text_decoders": {"glm4v_moe_lm": "specs.glm4v_moe.megatron:glm4v_moe_lm"},
    "vit_layer_specs": {"glm4v_vit": "specs.glm4v_moe.megatron:glm4v_vit_layers"},
    "models": {
        "glm4v_moe": "specs.glm4v_moe.fsdp2:ASSEMBLY",
        "glm4v": "specs.glm4v.fsdp2:ASSEMBLY",
        "qwen2_vl": "specs.qwen2_vl.fsdp2:ASSEMBLY",
        "qwen2_5_vl": "specs.qwen2_5_vl.fsdp2:ASSEMBLY",
    },
    "llm_layer_specs": {"glm4v_moe_lm": "specs.glm4v_moe.megatron:glm4v_moe_lm_layers"},
}
