"""A model family: which Hugging Face folders are its, which `model_id`s it is assembled from, what their tensors are called.

One `Family` per entry of the registry table `converters`. It is data; `mm_models.weights` and the command line act on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_models.config.config_map import ConfigMap
from mm_models.config.model import ModelConfig
from mm_models.config.strict import validate
from mm_models.errors import UserError
from mm_models.registry import table

SECTIONS = {"vision_encoder": "image_encoder", "vision_projector": "image_encoder", "text_decoder": None}
"""Section -> the section of model.json it stands in."""

NOT_USED = frozenset({
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "attention_dropout", "attn_implementation", "_attn_implementation_autoset", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "output_attentions", "output_hidden_states", "output_router_logits",
    "router_aux_loss_coef", "return_dict", "use_return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "is_decoder", "id2label", "label2id", "problem_type", "use_qk_norm", "image_end_token_id", "video_start_token_id",
    "video_end_token_id",
})  # fmt: skip
"""Keys of config.json that change no tensor and no arithmetic of the forward pass here."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """`ids` maps a section to its `model_id`; `prefixes` a part of the weight map to its Hugging Face prefix.

    `extras` are patterns of Hugging Face tensors that the architecture does not hold and that are ignored by name, printed,
    and copied through on export. `{num_layers}` in a pattern is the decoder's number of layers.
    """

    name: str
    model_id: str
    model_types: tuple[str, ...]
    ids: Mapping[str, str]
    prefixes: Mapping[str, str]
    root: ConfigMap
    extras: tuple[str, ...] = ()

    def model_json(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        """The content of model.json that a Hugging Face config describes, without `pipeline_num_layers`."""
        content: dict[str, Any] = {"model_id": self.model_id, **self.root.from_hf(config, where)}
        for section, model_id in self.ids.items():
            inside = content if SECTIONS[section] is None else content.setdefault(SECTIONS[section], {})
            inside[section] = table("config_maps").get(model_id).from_hf(config, where)
        return content

    def model(self, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        return validate(ModelConfig, self.model_json(config, where), f"{where} as model.json")

    def check_model(self, model: ModelConfig, config: Mapping[str, Any], where: str = "config.json") -> None:
        """Refuse a model.json that disagrees with the Hugging Face config, field by field."""
        faults = self.root.disagreements(model.model_dump(), config, where) if model.vision and model.text else []
        for section, model_id in self.ids.items():
            part = {"vision_encoder": model.vision, "vision_projector": model.projector, "text_decoder": model.text}[
                section
            ]
            if part is None:
                continue
            if part.model_id != model_id:
                faults.append(f"{section}.model_id is {part.model_id!r}, {where} needs {model_id!r}")
                continue
            faults += table("config_maps").get(model_id).disagreements(part.model_dump(), config, where)
        if faults:
            raise UserError(f"model.json disagrees with {where}: " + "; ".join(faults) + ".")

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """A Hugging Face config.json for `model`, in the newest spelling."""
        config: dict[str, Any] = {"model_type": self.model_types[0]}
        self.root.to_hf(model.model_dump(), config)
        for part in (model.vision, model.projector, model.text):
            if part is not None:
                table("config_maps").get(part.model_id).to_hf(part.model_dump(), config)
        return config

    def unread_keys(self, config: Mapping[str, Any]) -> list[str]:
        """Keys of config.json that no field map reads and that are not known to be harmless."""
        maps = [self.root, *(table("config_maps").get(model_id) for model_id in self.ids.values())]
        known = {".".join(path) for one in maps for path in one.known_paths()}
        sections = {one.hf_section for one in maps}
        unread = []
        for path, _ in _leaves(config):
            dotted = ".".join(path)
            tail = ".".join(path[1:]) if path[0] in sections else dotted
            harmless = tail in NOT_USED or tail.split(".")[0] in NOT_USED
            if dotted not in known and not harmless and not any(k.startswith(dotted + ".") for k in known):
                unread.append(dotted)
        return unread

    def is_extra(self, name: str, model: ModelConfig) -> bool:
        """Whether a Hugging Face tensor is on the family's list of known extras."""
        layers = str(model.text.num_layers) if model.text else "-"
        return any(re.fullmatch(pattern.replace("{num_layers}", layers), name) for pattern in self.extras)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a Hugging Face config, by `model_type`."""
    converters = table("converters")
    known: dict[str, Family] = {}
    for name in converters.ids():
        family = converters.get(name)
        known |= dict.fromkeys(family.model_types, family)
    got = config.get("model_type")
    if got not in known:
        raise UserError(f"{where}: model_type {got!r} has no converter. Known: {', '.join(sorted(known))}.")
    return known[got]


def family_of_model(model: ModelConfig) -> Family:
    """The family whose `model_id`s are the model's: all that it has, and its decoder first of all."""
    parts = {"vision_encoder": model.vision, "vision_projector": model.projector, "text_decoder": model.text}
    ids = {section: part.model_id for section, part in parts.items() if part is not None}
    families = [table("converters").get(name) for name in table("converters").ids()]
    matching = [
        family for family in families if all(family.ids.get(section) == model_id for section, model_id in ids.items())
    ]
    if not matching:
        raise UserError(
            f"no converter joins the model_ids {ids}. Known: {', '.join(family.name for family in families)}."
        )
    return matching[0]


def _leaves(config: Mapping[str, Any], prefix: tuple[str, ...] = ()):
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*prefix, str(key)))
        elif value is not None:
            yield (*prefix, str(key)), value
