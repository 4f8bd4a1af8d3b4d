"""What two descriptions of the same weights must agree on: everything the forward pass depends on.

Free are the split of layers, freezing, the loss, the draw from scratch, `patch`, and the name of the whole. Ids of a part that are
names of one thing (`qwen2lm`, `qwen2_5_lm`) are equal, and a token id that one of the two does not say is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mm_models.config.model import ModelConfig
from mm_models.config.strict import leaves
from mm_models.registry import table

FREE = frozenset({"pipeline_num_layers", "freeze", "loss_cfg", "init_method_std", "patch"})
TOKENS = frozenset({"img_context_token_id", "video_token_id", "vision_start_token_id"})
TABLES = (
    "sections", "weight_maps", "vision_encoders", "vit_layer_specs", "vision_projectors", "text_decoders", "llm_layer_specs",
)  # fmt: skip
"""Where an id says what it stands for."""


def differences(here: ModelConfig, there: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value here, value there) of every value that must be shared and is not."""
    ours, theirs = _binding(here), _binding(there)
    for key in sorted(ours | theirs):
        one, two = ours.get(key), theirs.get(key)
        if not _same(key, one, two):
            yield key, one, two


def _binding(model: ModelConfig) -> dict[str, Any]:
    content = leaves(model.model_dump(mode="json"))
    return {key: value for key, value in content if key != "model_id" and not set(key.split(".")) & FREE}


def _same(key: str, one: Any, two: Any) -> bool:
    if one == two or (key in TOKENS and None in (one, two)):
        return True
    return key.endswith(".model_id") and None not in (one, two) and _meaning(one) == _meaning(two)


def _meaning(id: str) -> dict[str, str]:
    return {name: table(name).target(id) for name in TABLES if id in table(name)}
