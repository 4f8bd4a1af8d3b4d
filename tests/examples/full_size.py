"""config.json of the published models, as their folders have it: flat for Qwen, with a text_config for GLM; parameters, topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FullSize:
    """A published model, and the example that ships for it."""

    folder: str
    size: str
    config: dict[str, Any]
    model: str
    """Hugging Face's class."""
    converter: str
    parameters: int
    tp: int
    vit: list[int]
    llm: list[int]

    def __str__(self) -> str:
        return f"{self.folder}-{self.size}"


QWEN = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
SIZES = {
    "2b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
}
"""Of either Qwen: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied."""
KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
TOWER = {"depth": 32, "num_heads": 16, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}


def qwen2_vl(size: str) -> dict[str, Any]:
    hidden, _, layers, *_ = SIZES[size]
    vision = TOWER | {
        "model_type": "qwen2_vl",
        "in_chans": 3,
        "embed_dim": 1280,
        "hidden_size": hidden,
        "mlp_ratio": 4,
        "hidden_act": "quick_gelu",
        "spatial_patch_size": 14,
    }
    root = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "max_window_layers": layers}
    return QWEN | root | dict(zip(KEYS, SIZES[size])) | {"max_position_embeddings": 32768, "vision_config": vision}


def qwen2_5_vl(size: str) -> dict[str, Any]:
    hidden, _, layers, *_ = SIZES[size]
    vision = TOWER | {
        "model_type": "qwen2_5_vl",
        "in_chans": 3,
        "hidden_size": 1280,
        "intermediate_size": 3420 if size in ("3b", "7b") else 3456,
        "out_hidden_size": hidden,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "hidden_act": "silu",
        "spatial_patch_size": 14,
    }
    root = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "max_window_layers": layers,
    }
    return QWEN | root | dict(zip(KEYS, SIZES[size])) | {"max_position_embeddings": 128000, "vision_config": vision}


GLM = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
    "image_token_id": 151343,
    "video_token_id": 151344,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_text",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        "max_position_embeddings": 65536,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338, 151348],
    },
    "vision_config": {
        "model_type": "glm4v",
        "depth": 24,
        "hidden_size": 1536,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "intermediate_size": 13696,
        "image_size": 336,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-05,
    },
}


def _full(family: str, size: str, parameters: int, tp: int, vit: list[int], llm: list[int]) -> FullSize:
    folder, model, converter, config = {
        "qwen2_vl": ("qwen2vl", "Qwen2VL", "Qwen2VLConverter", qwen2_vl),
        "qwen2_5_vl": ("qwen2.5vl", "Qwen2_5_VL", "Qwen2_5_VLConverter", qwen2_5_vl),
        "glm4v": ("glm4.1v", "Glm4v", "GlmConverter", lambda size: GLM),
    }[family]
    return FullSize(
        folder=folder,
        size=size,
        config=config(size),
        model=model,
        converter=converter,
        parameters=parameters,
        tp=tp,
        vit=vit,
        llm=llm,
    )


ALL = (
    _full("qwen2_vl", "2b", 2_208_985_600, 1, [32], [28]),
    _full("qwen2_vl", "7b", 8_291_375_616, 1, [32, 0, 0, 0], [1, 10, 10, 7]),
    _full("qwen2_vl", "72b", 73_405_560_320, 4, [32, *[0] * 7], [6, 11, 11, 11, 11, 11, 11, 8]),
    _full("qwen2_5_vl", "3b", 3_754_622_976, 1, [32], [36]),
    _full("qwen2_5_vl", "7b", 8_292_166_656, 1, [32, 0], [12, 16]),
    _full("qwen2_5_vl", "32b", 33_452_718_336, 2, [32, *[0] * 7], [1, 9, 9, 9, 9, 9, 9, 9]),
    _full("qwen2_5_vl", "72b", 73_410_777_344, 4, [32, *[0] * 7], [6, 11, 11, 11, 11, 11, 11, 8]),
    _full("glm4v", "9b", 10_292_777_472, 1, [24, 0, 0, 0], [5, 12, 12, 11]),
)
