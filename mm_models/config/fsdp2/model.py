"""`model`: which assembly, from which configuration, with which operators."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mm_models.config.fsdp2.kinds import Patterns, Text
from mm_models.config.strict import StrictModel


class Model(StrictModel):
    model_id: Text
    """Id in the registry's table `models`."""
    model_name_or_path: Text
    """A Hugging Face folder (its config.json), or a model.json. Weights come from training.load."""
    trust_remote_code: bool = False
    """Accepted and without effect: only stock Hugging Face classes are used, no code of the folder runs."""
    attn_implementation: Text = "sdpa"
    """flash_attention_2 and sdpa: the exact fused attention of the platform."""
    use_grouped_expert_matmul: bool = True
    """One grouped product for all experts; false: one product an expert."""
    expert_layout: Literal["stacked_hf", "stacked"] | None = None
    """How experts lie in memory, and in a DCP folder without manifest; null: as the manifest says, else stacked_hf."""
    freeze: Patterns = Field(default_factory=list)
    """Modules and parameters that do not train."""
