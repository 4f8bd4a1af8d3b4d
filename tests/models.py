"""The tiny models every test is made of: the real Hugging Face architectures, small widths, no value left at its default.

``tiny_config(family)`` returns the real configuration class; GLM-4.5V's head_dim (32) is deliberately not
hidden_size / heads (16), no two widths that could be mixed up are equal where the architecture lets them differ, and its
first decoder layer is dense. ``tiny_model`` fills *every* parameter and persistent buffer with distinct seeded values:
default initialisation (biases 0, norms 1, router bias 0) would hide a tensor that is dropped, swapped or left as it was.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

TEXT_FIELDS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,  # of 48 each: a width that divides by 32, for `tests/numerics/test_assumptions.py`
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    },
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": [1],
}

VISION_FIELDS: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "out_hidden_size": 64,
    "intermediate_size": 80,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}

ROOT_FIELDS: dict[str, Any] = {
    "image_token_id": 300,
    "video_token_id": 301,
    "image_start_token_id": 302,
    "image_end_token_id": 303,
    "video_start_token_id": 304,
    "video_end_token_id": 305,
    "tie_word_embeddings": False,
}


QWEN_ROOT: dict[str, Any] = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "tie_word_embeddings": False,
}
QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]},
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_window_layers": 4,
    "use_sliding_window": False,
}
PATCHES: dict[str, Any] = {
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One family's tiny model: the names of Hugging Face's classes and the fields of its configuration."""

    config: str
    model: str
    text: dict[str, Any]
    vision: dict[str, Any]
    root: dict[str, Any]


FAMILIES: dict[str, Tiny] = {
    "glm4v_moe": Tiny(
        config="Glm4vMoeConfig",
        model="Glm4vMoeForConditionalGeneration",
        text=TEXT_FIELDS,
        vision=VISION_FIELDS,
        root=ROOT_FIELDS,
    ),
    "glm4v": Tiny(
        config="Glm4vConfig",
        model="Glm4vForConditionalGeneration",
        text={
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "eos_token_id": [1],
        },
        vision=VISION_FIELDS,
        root=ROOT_FIELDS,
    ),
    "qwen2_vl": Tiny(
        config="Qwen2VLConfig",
        model="Qwen2VLForConditionalGeneration",
        text=QWEN_TEXT,
        # `hidden_size` is the width of the output here; `embed_dim` is the tower's.
        vision=PATCHES | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3, "hidden_act": "quick_gelu"},
        root=QWEN_ROOT,
    ),
    # Windows of 2 x 2 merged tokens: the images of the tests make whole and ragged ones.
    "qwen2_5_vl": Tiny(
        config="Qwen2_5_VLConfig",
        model="Qwen2_5_VLForConditionalGeneration",
        text=QWEN_TEXT,
        vision=PATCHES
        | {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
            "hidden_act": "silu",
        },
        root=QWEN_ROOT,
    ),
}


def tiny_config(family: str, **overrides: Any):
    """The tiny Hugging Face configuration of a family of `FAMILIES`; of `tower+decoder` the second's with the first's vision_config.

    An override goes to the section that has the field; a field both sections have (``hidden_size``) is the decoder's
    unless written ``vision_<field>`` (``vision_hidden_size=96``). An unknown field is an error.
    """
    import transformers

    tower, _, family = family.rpartition("+")
    if tower:
        config = tiny_config(family, **overrides)
        config.vision_config = tiny_config(tower).vision_config
        return config
    tiny = FAMILIES[family]
    text, vision, root = dict(tiny.text), dict(tiny.vision), dict(tiny.root)
    for key, value in overrides.items():
        if key.startswith("vision_") and key.removeprefix("vision_") in vision:
            vision[key.removeprefix("vision_")] = value
        elif key in text:
            text[key] = value
        elif key in vision:
            vision[key] = value
        elif key in root:
            root[key] = value
        else:
            raise TypeError(f"tiny {family} has no field {key!r}; known: {sorted(text | vision | root)}")
    config = getattr(transformers, tiny.config)(text_config=text, vision_config=vision, **root)
    config.architectures = [tiny.model]
    return config


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
    """The real Hugging Face model of ``tiny_config(family, **overrides)`` with distinct random values everywhere, in eval mode.

    ``tower+decoder`` (``glm4v+qwen2_5_vl``) is the second family's model with the first's ``visual`` in the place of its own.
    Weights are drawn in fp32 and rounded to ``dtype``; a router weight and its correction bias stay fp32, as
    transformers keeps them. Experts run ``grouped_mm`` and attention ``sdpa``: the arithmetic the model is compared with.
    """
    import transformers

    tower, _, family = family.rpartition("+")
    if tower:
        model = tiny_model(family, seed, dtype, **overrides)
        model.model.visual = tiny_model(tower, seed, dtype).model.visual
        model.config.vision_config = model.model.visual.config
        return model
    config = tiny_config(family, **overrides)
    config._attn_implementation = "sdpa"
    model = getattr(transformers, FAMILIES[family].model)(config)
    if hasattr(config.text_config, "n_routed_experts"):
        model.set_experts_implementation("grouped_mm")
    fill_distinct(model, seed)
    for name, tensor in list(model.named_parameters()) + list(_persistent_buffers(model)):
        if not _is_fp32(name):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    for part in (model.config.text_config, model.config.vision_config):
        part.dtype = dtype
    return model.eval()


def tiny_glm_config(**overrides: Any):
    """``tiny_config`` of GLM-4.5V."""
    return tiny_config("glm4v_moe", **overrides)


def tiny_glm_model(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
    """``tiny_model`` of GLM-4.5V."""
    return tiny_model("glm4v_moe", seed, dtype, **overrides)


def fill_distinct(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter and persistent buffer with values of its own, drawn from (seed, name)."""
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(_persistent_buffers(model)):
            generator = torch.Generator().manual_seed(_seed_of(seed, name))
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.copy_(_scaled(name, noise))


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith("mlp.gate.weight"):
        return noise / noise.shape[-1] ** 0.5  # logits of order one: the sigmoid scores of the experts stay apart
    if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
        return 1.0 + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "embed" in name:
        return 0.5 * noise
    fan_in = noise[0].numel() if "experts." not in name or noise.ndim == 2 else noise.shape[-1]
    return noise / fan_in**0.5


def _is_fp32(name: str) -> bool:
    return name.endswith(("mlp.gate.weight", "e_score_correction_bias"))


def _persistent_buffers(model: torch.nn.Module):
    persistent = set(model.state_dict())
    return [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "little")


def tiny_model_json(config, **sections: Any) -> dict[str, Any]:
    """model.json of a Hugging Face configuration, by the config maps of its family.

    Keyword arguments update a section, or a key at the root:
    ``tiny_model_json(config, text_decoder={"pipeline_num_layers": [2, 2]}, loss_cfg={"loss_type": "per_token_loss"})``.
    """
    from mm_models.config.family import family_of

    raw = config.to_dict()
    content = family_of(raw, "the tiny config").model_json(raw)
    for name, value in sections.items():
        if name in ("vision_encoder", "vision_projector"):
            content["image_encoder"][name] |= value
        elif isinstance(value, dict) and isinstance(content.get(name), dict):
            content[name] |= value
        else:
            content[name] = value
    return content
