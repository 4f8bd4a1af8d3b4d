"""Ids of operator variants, as plain strings `name/variant -> module:attribute`."""

CATALOGUE = {
    "ops": {
        "rms_norm/torch": "mm_models.ops.reference:rms_norm",
        "layer_norm/torch": "mm_models.ops.reference:layer_norm",
        "gelu/torch": "mm_models.ops.reference:gelu",
        "quick_gelu/torch": "mm_models.ops.reference:quick_gelu",
        "swiglu/torch": "mm_models.ops.reference:swiglu",
        "silu_mul/torch": "mm_models.ops.reference:silu_mul",
        "rotary/torch": "mm_models.ops.reference:apply_rotary",
        "rotary_interleaved/torch": "mm_models.ops.reference:apply_rotary_interleaved",
        "rotary_fp32/torch": "mm_models.ops.reference:apply_rotary_fp32",
        "causal_attention/torch": "mm_models.ops.reference:causal_attention",
        "segment_attention/torch": "mm_models.ops.reference:segment_attention",
        "grouped_matmul/torch": "mm_models.ops.reference:grouped_matmul",
    }
}
