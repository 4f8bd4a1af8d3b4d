"""The three folders a run names, held against each other: the model's configuration, the tokenizer's, the weights'.

`model.model_name_or_path` says what the model is, `preprocess_parameters.model_name_or_path` how text becomes tokens,
`training.load` what the weights are. Where two of them hold a configuration or a tokenizer, it must be the same one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_models.config.binding import differences
from mm_models.config.family import Composed, Family, family_of, family_of_model, parts_of
from mm_models.config.fsdp2 import RunConfig
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.strict import load_json
from mm_models.errors import UserError, nearest
from mm_models.weights import mmfolder
from mm_models.weights.dcp import folder as dcp_folder
from mm_models.weights.dcp import layouts
from mm_models.weights.hffolder import CONFIG, is_hf_folder
from mm_models.weights.sources import HELD_LAYOUTS, kind_of

KINDS = {"hf": "Hugging Face folder", "dcp": "DCP checkpoint", "mm": "checkpoint of the Megatron target"}
EXPECTED = {
    "hf": f"{CONFIG} and safetensors",
    "dcp": f".metadata, or the folder above it with {mmfolder.TRACKER}",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
STATE_OF_TOKENIZER = ("truncation", "padding")
"""Keys of tokenizer.json that the last user left there."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights come from. `kind` is scratch, hf, dcp or mm; `folder` is the one with the files, None from scratch.

    `expert_layout` is how a DCP folder holds experts; None for any other kind, and without experts.
    """

    kind: str
    path: str | None = None
    folder: Path | None = None
    expert_layout: str | None = None

    def describe(self) -> str:
        if self.kind == "scratch":
            return "random, training.from_scratch is true"
        return f"{KINDS[self.kind]} {self.folder}"


def read_model(config: RunConfig) -> tuple[Family, ModelConfig, Mapping[str, Any]]:
    """(family, model, content of config.json) of model.model_name_or_path: a Hugging Face folder, or a model.json.

    The content has its text fields in text_config, wherever the file has them.
    """
    where = "model.model_name_or_path"
    path = Path(config.model.model_name_or_path)
    if path.is_file():
        model = load_model_config(path)
        family = family_of_model(model)
        hf_config = family.hf_config(model)
    else:
        _require_folder(path, where)
        if not is_hf_folder(path):
            raise UserError(f"{where}: {path} has no {CONFIG}. Name a Hugging Face folder, or a model.json.")
        hf_config = load_json(path / CONFIG)
        family = family_of(hf_config, str(path / CONFIG))
        model = family.model(hf_config, str(path / CONFIG))
        hf_config = family.nested(hf_config)
    if isinstance(family, Composed):
        parts = ", ".join(part.model_id for part in parts_of(model).values())
        raise UserError(
            f"{where}: {path} is of parts that no Hugging Face class holds together ({parts}); this target trains Hugging Face's "
            "own classes. Train it with pretrain_vlm.py."
        )
    if family.model_id != config.model.model_id:
        raise UserError(
            f"model.model_id is {config.model.model_id!r}, but {path} is a {family.model_id!r}. Correct one of them."
        )
    return family, model, hf_config


def find_source(config: RunConfig, model: ModelConfig) -> Source:
    """Where the weights come from, from the folder's own files; `load_format` other than auto must agree."""
    training = config.training
    if training.from_scratch:
        return Source(kind="scratch")
    where = "training.load" if training.load else "model.model_name_or_path (training.load is null)"
    path = Path(training.load or config.model.model_name_or_path)
    _require_folder(path, where)
    kind, asked = kind_of(path), training.load_format
    if asked not in ("auto", kind):
        raise UserError(
            f"{where}: {path} is not a {KINDS[asked]} (load_format {asked}): {EXPECTED[asked]} expected, it holds {_content(path)}."
        )
    try:
        folder = {"hf": Path, "dcp": dcp_folder.resolve, "mm": mmfolder.resolve}[kind](path)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    layout = None
    if kind == "dcp" and has_experts(model):
        layout = _dcp_layout(folder, config.model.expert_layout)
    return Source(kind=kind, path=str(path), folder=folder, expert_layout=layout)


def has_experts(model: ModelConfig) -> bool:
    return model.text is not None and bool(model.text.num_moe_experts)


def _dcp_layout(folder: Path, asked: str | None) -> str:
    """How a DCP folder holds experts: its manifest says, else the file, else the variable. Refused: what no model can hold."""
    manifest = load_json(folder / mmfolder.MANIFEST) if (folder / mmfolder.MANIFEST).is_file() else {}
    found, said = manifest.get("expert_layout"), "its manifest says so"
    stated = found is not None
    if not stated:
        found = layouts.declared(asked)
        said = "model.expert_layout says so" if asked else f"{layouts.VARIABLE} says so; the folder has no manifest"
    if found not in HELD_LAYOUTS:
        raise UserError(
            f"{folder}: experts are {found} ({said}), and the model holds {' or '.join(HELD_LAYOUTS)}. "
            + ("" if stated else "If they lie otherwise, set model.expert_layout. ")
            + layouts.reconvert(folder, have=found)
        )
    if asked not in (None, found):
        raise UserError(
            f"{folder}: experts are {found} ({said}), but model.expert_layout is {asked}. Set it to {found}. "
            f"{layouts.reconvert(folder, asked, have=found)}"
        )
    return found


def check_paths(config: RunConfig, family: Family, model: ModelConfig, source: Source) -> None:
    """Refuse a configuration or a tokenizer that differs between the three folders."""
    text = Path(config.data.dataset_param.preprocess_parameters.model_name_or_path)
    _require_folder(text, "data.dataset_param.preprocess_parameters.model_name_or_path")
    own = Path(config.model.model_name_or_path)
    weights = [] if source.folder is None else [source.folder, source.folder.parent]
    for folder in _distinct([text, *weights], beside=own):
        if is_hf_folder(folder):
            _same_model(family, model, own, folder / CONFIG)
    for folder in _distinct([own, *weights], beside=text):
        for name in TOKENIZER_FILES:
            if (text / name).is_file() and (folder / name).is_file() and not _same(text / name, folder / name):
                raise UserError(
                    f"{text / name} and {folder / name} differ: the data would be made with another tokenizer than the model's. "
                    "Point preprocess_parameters.model_name_or_path, model.model_name_or_path and training.load at one model."
                )


def _same_model(family: Family, model: ModelConfig, own: Path, config: Path) -> None:
    content = load_json(config)
    if (theirs := family_of(content, str(config))).name != family.name:
        raise UserError(f"model.model_name_or_path {own} is a {family.model_id!r}, {config} a {theirs.model_id!r}.")
    faults = [
        f"{key} is {here!r} in {own}, {there!r} in {config}"
        for key, here, there in differences(model, family.model(content, str(config)))
    ]
    if faults:
        raise UserError(f"model.model_name_or_path and {config} are not the same model: {'; '.join(faults)}.")


def _same(one: Path, two: Path) -> bool:
    """Equal bytes, or for tokenizer.json equal content but for what its last user left there."""
    a, b = one.read_bytes(), two.read_bytes()
    if a == b:
        return True
    if one.name != "tokenizer.json":
        return False
    contents = [json.loads(text) for text in (a, b)]
    for content in contents:
        for key in STATE_OF_TOKENIZER:
            content.pop(key, None)
    return contents[0] == contents[1]


def _distinct(folders: list[Path], *, beside: Path) -> list[Path]:
    """`folders` once each, without `beside` and without those that are not there."""
    found = {folder.resolve(): folder for folder in folders if folder.is_dir()}
    found.pop(beside.resolve(), None)
    return list(found.values())


def _require_folder(path: Path, where: str) -> None:
    if path.is_dir():
        return
    if path.exists():
        raise UserError(f"{where}: {path} is a file, expected a folder.")
    siblings = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
    close = nearest(path.name, siblings)
    raise UserError(f"{where}: {path}: no such folder." + (f" Did you mean {path.parent / close}?" if close else ""))


def _content(path: Path) -> str:
    names = sorted(child.name for child in path.iterdir())
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"
