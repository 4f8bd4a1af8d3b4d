"""A model family: which Hugging Face folders are its, which `model_id`s it is assembled from, what their tensors are called.

One `Family` per entry of the registry table `converters`. It is data; `mm_models.weights` and the command line act on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_models.config.binding import differences
from mm_models.config.config_map import ConfigMap
from mm_models.config.model import ModelConfig
from mm_models.config.sections import Section
from mm_models.config.split import without_split
from mm_models.config.strict import load_json, validate
from mm_models.errors import UserError
from mm_models.registry import table

COMPOSED = "composed"
"""`model_type` of a folder whose config.json holds a model.json."""

SECTIONS = {"vision_encoder": "image_encoder", "vision_projector": "image_encoder", "text_decoder": None}
"""Section -> the section of model.json it stands in."""

NOT_USED = frozenset({
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "attention_dropout", "attn_implementation", "_attn_implementation_autoset", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "output_attentions", "output_hidden_states", "output_router_logits",
    "router_aux_loss_coef", "return_dict", "use_return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "is_decoder", "id2label", "label2id", "problem_type", "use_qk_norm", "image_end_token_id", "video_start_token_id",
    "video_end_token_id", "vision_end_token_id", "vision_token_id", "max_window_layers", "sliding_window", "layer_types",
    "spatial_patch_size",
})  # fmt: skip
"""Keys of config.json that change no tensor and no arithmetic of the forward pass here."""

FLAT_KEYS = frozenset({"rope_scaling", "rope_parameters", "attention_dropout", "max_window_layers", "sliding_window"})
"""Keys of a decoder, beside those of its config map, that older files have at the root."""
ROOT_KEYS = frozenset({"tie_word_embeddings", "vision_config", "text_config", "model_type"})
"""Keys that stay at the root."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """`ids` maps a section to the `model_id`s it may have, the usual one first, and `maps` to its config map.

    `prefixes` are the Hugging Face prefixes of the parts of the weight map, as transformers has them in memory;
    `old_prefixes` what older folders have in their place. `fits` tells families with the same ids apart. `extras` are patterns
    of Hugging Face tensors that the architecture does not hold and that are ignored by name, printed, and copied through on
    export; `{num_layers}` in a pattern is the decoder's number of layers.
    """

    name: str
    model_id: str
    model_types: tuple[str, ...]
    ids: Mapping[str, tuple[str, ...]]
    maps: Mapping[str, ConfigMap]
    prefixes: Mapping[str, str]
    root: ConfigMap
    old_prefixes: Mapping[str, str] = field(default_factory=dict)
    fits: Callable[[ModelConfig], bool] = lambda model: True
    extras: tuple[str, ...] = ()

    # --- configuration ------------------------------------------------------------------------------------------------

    def nested(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        """`config` with the decoder's fields in `text_config`.

        Files of older releases have them at the root. Where both are there they must agree: which one counts depends on
        the release that reads the file. So must `rope_parameters` with `rope_scaling`, for which transformers leaves it aside.
        """
        text, vision = config.get("text_config"), config.get("vision_config")
        names = {path[1] for path in self.maps["text_decoder"].known_paths() if path[0] == "text_config"}
        at_root = {key: value for key, value in config.items() if key in names | FLAT_KEYS and key not in ROOT_KEYS}
        if not isinstance(text, Mapping):
            rest = {key: value for key, value in config.items() if key not in at_root}
            nested = {**rest, "text_config": at_root, **({"vision_config": vision} if vision is not None else {})}
            self._check_rope(nested, where)
            return nested
        faults = [
            f"{key} is {value!r} at the root, {text[key]!r} in text_config"
            for key, value in at_root.items()
            if key in names and value is not None and text.get(key) is not None and text[key] != value
        ] or [
            f"{key} is {root!r} at the root, {inside!r} by text_config"
            for key, root, inside in self._decoder.differences({**config, "text_config": at_root}, config, where)
        ]
        if faults:
            raise UserError(f"{where}: {'; '.join(faults)}. Keep one of each.")
        self._check_rope(config, where)
        return {key: value for key, value in config.items() if key not in at_root}

    def _check_rope(self, config: Mapping[str, Any], where: str) -> None:
        """Refuse a `rope_parameters` that says what the `rope_scaling` beside it does not."""
        text = config["text_config"]
        if not (text.get("rope_parameters") and text.get("rope_scaling")):
            return
        alone = {**config, "text_config": {key: value for key, value in text.items() if key != "rope_parameters"}}
        if faults := self._decoder.differences(config, alone, where):
            said = "; ".join(f"{key} is {both!r}, without rope_parameters {scaling!r}" for key, both, scaling in faults)
            raise UserError(f"{where}: {said}. transformers reads rope_scaling alone where both are there; keep one.")

    @property
    def _decoder(self) -> ConfigMap:
        return self.maps["text_decoder"]

    def model_json(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        """The content of model.json that a Hugging Face config describes, without `pipeline_num_layers`."""
        config = self.nested(config, where)
        content: dict[str, Any] = {"model_id": self.model_id, **self.root.from_hf(config, where)}
        for section, ids in self.ids.items():
            inside = content if SECTIONS[section] is None else content.setdefault(SECTIONS[section], {})
            inside[section] = {"model_id": ids[0], **self.maps[section].from_hf(config, where)}
        return content

    def model(self, config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        return validate(ModelConfig, self.model_json(config, where), f"{where} as model.json")

    def check_model(self, model: ModelConfig, config: Mapping[str, Any], where: str = "config.json") -> None:
        """Refuse a model.json that disagrees with the Hugging Face config, field by field."""
        config = self.nested(config, where)
        faults = []
        if model.vision and model.text:  # ids of tokens; one that model.json does not say is not compared
            faults = self.root.disagreements(model.model_dump(exclude_none=True), config, where)
        for section, part in parts_of(model).items():
            if part.model_id not in self.ids[section]:
                faults.append(
                    f"{section}.model_id is {part.model_id!r}, {where} needs {' or '.join(self.ids[section])}"
                )
                continue
            faults += self.maps[section].disagreements(part.model_dump(), config, where)
        if faults:
            raise UserError(f"model.json disagrees with {where}: " + "; ".join(faults) + ".")

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """A Hugging Face config.json for `model`, in the newest spelling."""
        config: dict[str, Any] = {"model_type": self.model_types[0]}
        self.root.to_hf(model.model_dump(), config)
        for section, part in parts_of(model).items():
            self.maps[section].to_hf(part.model_dump(), config)
        return config

    def unread_keys(self, config: Mapping[str, Any]) -> list[str]:
        """Keys of config.json that no field map reads and that are not known to be harmless."""
        maps = [self.root, *self.maps.values()]
        known = {".".join(path) for one in maps for path in one.known_paths()}
        sections = {one.hf_section for one in maps}
        unread = []
        for path, _ in _leaves(self.nested(config)):
            dotted = ".".join(path)
            tail = ".".join(path[1:]) if path[0] in sections else dotted
            harmless = tail in NOT_USED or tail.split(".")[0] in NOT_USED
            if dotted not in known and not harmless and not any(k.startswith(dotted + ".") for k in known):
                unread.append(dotted)
        return unread

    # --- names of tensors ---------------------------------------------------------------------------------------------

    def prefixes_of(self, names: Iterable[str], where: str = "the folder") -> dict[str, str]:
        """Which prefix each part has among `names`, the tensors of one folder. Refused: a part under both of its prefixes."""
        names, found = list(names), dict(self.prefixes)
        for part, old in self.old_prefixes.items():
            new = self.prefixes[part]
            fresh = [name for name in names if name.startswith(new)]
            others = [one for other, one in self.prefixes.items() if other != part and one != new]
            aged = [
                name
                for name in names
                if name.startswith(old) and not name.startswith((new, *others)) and not self._deeper(part, old, name)
            ]
            if fresh and aged:
                raise UserError(
                    f"{where}: the {part} stands under two names, {aged[0]!r} and {fresh[0]!r}; which one counts is not known."
                )
            if aged:
                found[part] = old
        return found

    def _deeper(self, part: str, prefix: str, name: str) -> bool:
        """Whether `name` belongs to another part whose prefix begins with this one's."""
        return any(
            len(other) > len(prefix) and other.startswith(prefix) and name.startswith(other)
            for each in (self.prefixes, self.old_prefixes)
            for owner, other in each.items()
            if owner != part
        )

    def is_extra(self, name: str, model: ModelConfig) -> bool:
        """Whether a Hugging Face tensor is on the family's list of known extras."""
        layers = str(model.text.num_layers) if model.text else "-"
        return any(re.fullmatch(pattern.replace("{num_layers}", layers), name) for pattern in self.extras)


@dataclass(frozen=True, kw_only=True)
class Composed(Family):
    """A model of parts that no published family joins: this tower, that decoder.

    Its folder has Hugging Face's names for the tensors of each part, and a config.json that holds the model.json itself:

        {"model_type": "composed", "model": {"image_encoder": {...}, "text_decoder": {...}, ...}}
    """

    def nested(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        return dict(config)

    def model_json(self, config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
        return without_split(_model_inside(config, where)).model_dump(exclude_none=True)

    def check_model(self, model: ModelConfig, config: Mapping[str, Any], where: str = "config.json") -> None:
        faults = [
            f"{key} is {ours!r}, {where} says {theirs!r}"
            for key, ours, theirs in differences(model, self.model(config, where))
        ]
        if faults:
            raise UserError(f"model.json disagrees with {where}: " + "; ".join(faults) + ".")

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        return {"model_type": COMPOSED, "model": without_split(model).model_dump(exclude_none=True)}

    def unread_keys(self, config: Mapping[str, Any]) -> list[str]:
        return []


def composed(model: ModelConfig) -> Composed:
    """The family of one mixed model, from the weight maps of its parts."""
    prefixes: dict[str, str] = {}
    for part in parts_of(model).values():
        prefixes |= table("weight_maps").get(part.model_id).hf_prefixes
    return Composed(
        name="composed",
        model_id=COMPOSED,
        model_types=(COMPOSED,),
        ids={section: (part.model_id,) for section, part in parts_of(model).items()},
        maps={},
        prefixes=prefixes,
        root=ConfigMap(model_id="", section="", hf_section="", fields=()),
    )


def _model_inside(config: Mapping[str, Any], where: str) -> ModelConfig:
    if not isinstance(config.get("model"), Mapping):
        raise UserError(f"{where}: model_type {COMPOSED!r} needs the content of a model.json under 'model'.")
    return validate(ModelConfig, config["model"], f"{where}, model")


def parts_of(model: ModelConfig) -> dict[str, Section]:
    """Section name -> section of every part the model has."""
    parts = {"vision_encoder": model.vision, "vision_projector": model.projector, "text_decoder": model.text}
    return {name: part for name, part in parts.items() if part is not None}


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a Hugging Face config, by `model_type`."""
    if not isinstance(config, Mapping):
        raise UserError(f"{where}: expected an object with model_type, got {type(config).__name__}.")
    known = {model_type: family for family in _families() for model_type in family.model_types}
    got = config.get("model_type")
    if got == COMPOSED:
        return composed(_model_inside(config, where))
    if got not in known:
        raise UserError(f"{where}: model_type {got!r} has no converter. Known: {', '.join(sorted(known))}.")
    return known[got]


def families_of_model(model: ModelConfig) -> list[Family]:
    """The families whose `model_id`s and structure are the model's."""
    parts = parts_of(model)
    return [
        family
        for family in _families()
        if all(part.model_id in family.ids[section] for section, part in parts.items()) and family.fits(model)
    ]


def family_of_model(model: ModelConfig) -> Family:
    """The family of a model.json: all its `model_id`s, and where a part alone leaves a choice, the first by name."""
    return (families_of_model(model) or [composed(model)])[0]


def contradictions(content: Mapping[str, Any]) -> list[str]:
    """Sizes in a file of another schema that are not those of the model it names: config.json's where its folder is there, else
    those of the family's published model; with the keys it lacks."""
    folder = Path(str(content.get("init_from_hf_path"))) / "config.json"
    family = next((one for one in _families() if one.model_id == content.get("model_id")), None)
    if folder.is_file():
        config = load_json(folder)
        family = family_of(config, str(folder))
    elif family is not None:
        config = {"model_type": family.model_types[0]}
    else:
        return []
    wanted, faults = family.model_json(config), []
    for section, place in SECTIONS.items():
        have = ((content.get(place) or {}) if place else content).get(section) or {}
        want = (wanted[place] if place else wanted)[section]
        faults += [
            f"{section}.{key} is {have[key]!r}, not {value!r}"
            for key, value in want.items()
            if key in have and have[key] != value
        ]
        lacking = [key for key in want if key not in have]
        faults += [f"{section} lacks {', '.join(lacking)}"] if lacking else []
    return faults


def _families() -> list[Family]:
    return [table("converters").get(name) for name in table("converters").ids()]


def _leaves(config: Mapping[str, Any], prefix: tuple[str, ...] = ()):
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*prefix, str(key)))
        elif value is not None:
            yield (*prefix, str(key)), value
