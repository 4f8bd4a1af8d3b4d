"""What who adds a family could get wrong, one thing at a time, each made of a right one."""

from __future__ import annotations

from dataclasses import replace

from converters.qwen2_5_vl.converter import Qwen2_5_VLConverter
from converters.qwen2_vl.text import WEIGHTS
from mm_models.data.positions import mrope
from mm_models.weights.rules import COLUMN, REPLICATE, Rule, Same, WeightTable
from specs.qwen2_5_vl.fsdp2 import ASSEMBLY

DECODER = "qwen2_5_lm"
"""The decoder that is broken here."""


def _changed(tail: str, **changes: object) -> WeightTable:
    """The sound map with the rules whose names end so changed; without changes they are dropped."""
    rules: list[Rule] = []
    for rule in WEIGHTS.rules:
        if not rule.mm.endswith(tail):
            rules.append(rule)
        elif changes:
            rules.append(replace(rule, **changes))
    assert rules != list(WEIGHTS.rules), tail
    return replace(WEIGHTS, rules=tuple(rules))


HF = "layers.{layer}."

dropped = _changed("pre_mlp_layernorm.weight")
misnamed = _changed("pre_mlp_layernorm.weight", mm="decoder.layers.{layer}.post_attention_layernorm.weight")
misnamed_there = _changed("pre_mlp_layernorm.weight", hf=Same(HF + "post_attn_layernorm.weight"))
twice_there = _changed("pre_mlp_layernorm.weight", hf=Same(HF + "input_layernorm.weight"))
wrong_shard = _changed("linear_proj.weight", shard=COLUMN)
not_split = _changed("word_embeddings.weight", shard=REPLICATE)
halves = _changed("linear_fc1.weight", shard=COLUMN)
wrong_place = _changed("final_layernorm.weight", place="text_first")


def shifted(*args, **kwargs):
    """Positions that start at 1."""
    return mrope(*args, **kwargs) + 1


nameless = replace(Qwen2_5_VLConverter, name="nameless", model_id="nameless", model_types=("nameless",))
"""A family that nobody made a tiny model of."""

assembly = replace(ASSEMBLY, hf_class="transformers:Qwen2VLForConditionalGeneration")
"""Of another class than the family's."""
