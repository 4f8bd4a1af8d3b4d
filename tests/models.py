"""The tiny GLM-4.5V every test is made of: the real Hugging Face architecture, small widths, no value left at its default.

``tiny_glm_config`` returns the real ``Glm4vMoeConfig``; head_dim (32) is deliberately not hidden_size / heads (16), the
two ViT layers share no width with the decoder's MLPs, and the first decoder layer is dense. ``tiny_glm_model`` fills
*every* parameter and persistent buffer with distinct seeded values: default initialisation (biases 0, norms 1, router
bias 0) would hide a tensor that is dropped, swapped or left at its initial value.
"""

from __future__ import annotations

import hashlib
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
    "n_shared_experts": 1,
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


def tiny_glm_config(**overrides: Any):
    """The tiny ``Glm4vMoeConfig``.

    An override goes to the section that has the field; a field both sections have (``hidden_size``) is the decoder's
    unless written ``vision_<field>`` (``vision_hidden_size=96``). An unknown field is an error.
    """
    from transformers import Glm4vMoeConfig

    text, vision, root = dict(TEXT_FIELDS), dict(VISION_FIELDS), dict(ROOT_FIELDS)
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
            raise TypeError(f"tiny_glm_config has no field {key!r}; known: {sorted(text | vision | root)}")
    config = Glm4vMoeConfig(text_config=text, vision_config=vision, **root)
    config.architectures = ["Glm4vMoeForConditionalGeneration"]
    return config


def tiny_glm_model(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
    """The real Hugging Face model of ``tiny_glm_config(**overrides)`` with distinct random values everywhere, in eval mode.

    Weights are drawn in fp32 and rounded to ``dtype``; the router weight and ``e_score_correction_bias`` stay fp32, as
    transformers keeps them. Experts run ``grouped_mm`` and attention ``sdpa``: the arithmetic the model is compared with.
    """
    from transformers import Glm4vMoeForConditionalGeneration

    config = tiny_glm_config(**overrides)
    config._attn_implementation = "sdpa"
    model = Glm4vMoeForConditionalGeneration(config)
    model.set_experts_implementation("grouped_mm")
    fill_distinct(model, seed)
    for name, tensor in list(model.named_parameters()) + list(_persistent_buffers(model)):
        if not _is_fp32(name):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    for part in (model.config.text_config, model.config.vision_config):
        part.dtype = dtype
    return model.eval()


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
    if "norm" in name and name.endswith("weight"):
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
    """model.json of a ``Glm4vMoeConfig``, by the config map.

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
