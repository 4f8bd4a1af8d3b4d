"""The three folders a run names, held against each other: the model's configuration, the tokenizer's, the weights'.

`model.model_name_or_path` says what the model is, `preprocess_parameters.model_name_or_path` how text becomes tokens,
`training.load` what the weights are. Where two of them hold a configuration or a tokenizer, it must be the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_models.config.family import Family, family_of, family_of_model
from mm_models.config.fsdp2 import RunConfig
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.strict import load_json
from mm_models.errors import UserError, nearest
from mm_models.weights.hffolder import CONFIG, is_hf_folder
from mm_models.weights.mmfolder import MANIFEST, RELEASE, TRACKER, iteration_name

METADATA = ".metadata"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
STATE_OF_TOKENIZER = ("truncation", "padding")
"""Keys of tokenizer.json that the last user left there."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights come from. `kind` is scratch, hf, dcp or megatron; `folder` is the one with the files, None from scratch.

    `expert_layout` is what the folder's manifest says, None where nothing says it.
    """

    kind: str
    path: str | None = None
    folder: Path | None = None
    expert_layout: str | None = None

    def describe(self) -> str:
        if self.kind == "scratch":
            return "random, training.from_scratch is true"
        names = {"hf": "Hugging Face folder", "dcp": "DCP checkpoint", "megatron": "checkpoint of the Megatron target"}
        return f"{names[self.kind]} {self.folder}"


def read_model(config: RunConfig) -> tuple[Family, ModelConfig, Mapping[str, Any]]:
    """(family, model, content of config.json) of model.model_name_or_path: a Hugging Face folder, or a model.json."""
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
    if family.model_id != config.model.model_id:
        raise UserError(
            f"model.model_id is {config.model.model_id!r}, but {path} is a {family.model_id!r}. Correct one of them."
        )
    return family, model, hf_config


def find_source(config: RunConfig) -> Source:
    """Where the weights come from, from the folder's own files; `load_format` other than auto must agree."""
    training = config.training
    if training.from_scratch:
        return Source(kind="scratch")
    where = "training.load" if training.load else "model.model_name_or_path (training.load is null)"
    path = Path(training.load or config.model.model_name_or_path)
    _require_folder(path, where)
    asked = training.load_format
    if asked in ("hf", "auto") and is_hf_folder(path) and any(path.glob("*.safetensors")):
        return Source(kind="hf", path=str(path), folder=path)
    folder = checkpoint_folder(path)
    if asked in ("dcp", "auto") and (folder / METADATA).is_file():
        return Source(kind="dcp", path=str(path), folder=folder, expert_layout=_manifest(folder).get("expert_layout"))
    if asked == "auto" and (folder / MANIFEST).is_file():
        return Source(kind="megatron", path=str(path), folder=folder)
    expected = {
        "hf": f"a Hugging Face folder ({CONFIG} and safetensors)",
        "dcp": f"a DCP checkpoint ({METADATA}), or its parent with {TRACKER}",
        "auto": f"a Hugging Face folder, a DCP checkpoint or its parent with {TRACKER}",
    }[asked]
    raise UserError(f"{where}: {path} is not {expected} (load_format {asked}); it holds {_content(path)}.")


def checkpoint_folder(path: Path) -> Path:
    """The folder with the files: `path` itself, or the one that the tracker in it names."""
    if (path / METADATA).is_file() or (path / MANIFEST).is_file() or not (path / TRACKER).is_file():
        return path
    text = (path / TRACKER).read_text(encoding="utf-8").strip()
    if text != RELEASE and not text.isdecimal():
        raise UserError(f"{path / TRACKER}: says {text!r}, expected {RELEASE!r} or an iteration number.")
    folder = path / (RELEASE if text == RELEASE else iteration_name(int(text)))
    if not folder.is_dir():
        raise UserError(f"{path}: {folder.name} is not there, but {TRACKER} names it. It holds {_content(path)}.")
    return folder


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
    wanted = dict(_leaves(family.model_json(content, str(config))))
    have = dict(_leaves(model.model_dump()))
    faults = [
        f"{key} is {have.get(key)!r} in {own}, {value!r} in {config}"
        for key, value in wanted.items()
        if have.get(key) != value
    ]
    if faults:
        raise UserError(f"model.model_name_or_path and {config} are not the same model: {'; '.join(faults)}.")


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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


def _manifest(folder: Path) -> Mapping[str, Any]:
    return load_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}


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
