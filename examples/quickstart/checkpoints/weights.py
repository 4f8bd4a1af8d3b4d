"""A family's Hugging Face model with random weights: every tensor has values of its own, so that one that is lost or
swapped on the way shows."""

from __future__ import annotations

import hashlib

import torch
from checkpoints.family import Family

FP32_NAMES = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
"""A router stays fp32 in a bf16 model, as transformers keeps it."""


def make_model(family: Family, tokenizer, dtype: torch.dtype, seed: int):
    """The model in `dtype`; a router stays fp32."""
    import transformers

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in family.tokens}
    config = family.config(ids)
    model = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(draw(name, tensor.shape, seed))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in model.state_dict() and not name.endswith(FP32_NAMES):
            tensor.data = tensor.data.to(dtype)
    for part in (config, config.text_config, config.vision_config):
        part.dtype = dtype
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[ids[token] for token in family.stops], pad_token_id=ids[family.pad], do_sample=False
    )
    return model


def draw(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Values of one tensor, from (seed, name): norms around 1, biases around 0, weights at 1 / sqrt(inputs)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))
    if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.05 * noise
    if "embed" in name:
        return 0.3 * noise
    return noise / (noise.shape[-1] if "experts" in name else noise[0].numel()) ** 0.5
