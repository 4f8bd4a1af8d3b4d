"""`training.plugin`: names of MindSpeed-MM that are built in here, and plugins of the user."""

from __future__ import annotations

from collections.abc import Sequence

from mm_models.errors import UserError, nearest
from mm_models.registry import load_plugins

BUILT_IN = {
    "mindspeed_mm/fsdp/models/glm4_5v": "model_id glm4v_moe",
    "mindspeed_mm/fsdp/data/datasets/huggingface": "dataset_type huggingface",
}
"""A plugin of MindSpeed-MM -> the entry of the registry that does its work here."""


def load(entries: Sequence[str]) -> list[str]:
    """Import the plugins; a line for each that says what it became. A path that does not exist is a `UserError`."""
    lines = []
    for entry in entries:
        name = entry.strip("/").removesuffix(".py")
        name = name if "/" in name else name.replace(".", "/")
        if name in BUILT_IN:
            lines.append(f"plugin {entry}: built in, {BUILT_IN[name]}")
            continue
        try:
            load_plugins([entry])
        except UserError as error:
            close = nearest(name, BUILT_IN)
            hint = f" Did you mean {close!r}? It is built in." if close else ""
            raise UserError(f"training.plugin: {error}{hint}") from error
        lines.append(f"plugin {entry}: loaded")
    return lines
