"""Models of parts that no published family joins: folders and model.json of `tower+decoder` of `tests.models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mm_models.config.family import COMPOSED
from tests.models import tiny_config, tiny_model, tiny_model_json

MIXES = ("glm4v+qwen2_5_vl", "qwen2_5_vl+glm4v")
"""GLM-4.1V's tower and projector before Qwen2.5-VL's decoder, and the other way round."""


def composed_json(mix: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The content of model.json: the parts of each family's own, ids of tokens the decoder's. `sections` update one each."""
    tower, decoder = (tiny_model_json(tiny_config(family)) for family in mix.split("+"))
    content = {**decoder, "model_id": COMPOSED, "image_encoder": tower["image_encoder"]}
    for name, values in sections.items():
        (content if name == "text_decoder" else content["image_encoder"])[name] |= values
    return content


def composed_folder(path: Path, mix: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face folder of the mix: the tensors of both halves under their own names, and a config.json of the parts."""
    path.mkdir(parents=True)
    state = {name: tensor.contiguous() for name, tensor in tiny_model(mix, seed, dtype).state_dict().items()}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": COMPOSED, "model": composed_json(mix)}, indent=2))
    return path
