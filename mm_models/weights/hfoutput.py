"""A Hugging Face folder to be, in the image of a reference folder: its names, expert layout, shards, order and metadata.

A shard whose tensors all keep the reference's data type gets the reference's own header, so that an unchanged model comes
back byte for byte. Everything else a model needs beside weights (config, generation config, tokenizer, processor, chat
template) is copied; `config.json` says another data type when the tensors have another one, and no JSON keeps a local path.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_models.config import bounds
from mm_models.config.bounds import Bounds, Stated
from mm_models.weights import hffolder
from mm_models.weights.boxes import volume, whole
from mm_models.weights.dtypes import TORCH_NAMES, itemsize
from mm_models.weights.hffolder import HfFolder, Stored
from mm_models.weights.output import write_atomically
from mm_models.weights.plan import Fragment
from mm_models.weights.stores import HfStore

MARK = "mm_export.json"
"""Says that a folder is an export of this tool, and of what."""

Change = Callable[[str, Any], None]
"""Edits the content of the JSON file it is given the name of."""

EXPECTED_FILES = {
    "processor": bounds.FILES,
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json"),
    "chat template": ("chat_template.jinja", "chat_template.json"),
    "generation config": ("generation_config.json",),
}


def keep(name: str, content: Any) -> None:
    """Edits nothing."""


@dataclass(kw_only=True)
class HfOutput:
    """`dtypes` maps a canonical global tensor to the data type it will have; extras are copied from the reference unless dropped.
    `change` edits the JSON files that are copied."""

    reference: HfFolder
    store: HfStore
    dtypes: Mapping[str, str]
    cast: bool = False
    drop_extra: bool = False
    change: Change = keep
    _stored: list[Stored] = field(default_factory=list)

    def __post_init__(self):
        by_place = {(f.file, f.offset): f for f in (*self.store.fragments, *self.store.copies)}
        self._model = {
            name: by_place[t.file, t.offset]
            for name, t in self.reference.tensors.items()
            if (t.file, t.offset) in by_place
        }
        self._dtype = {name: t.dtype for name, t in self.reference.tensors.items()}
        for name, fragment in self._model.items():
            self._dtype[name] = self.dtypes[fragment.placements[0].tensor]

    @property
    def extras(self) -> tuple[Stored, ...]:
        return () if self.drop_extra else self.store.extras

    def changed_dtypes(self) -> list[tuple[str, str, str]]:
        """(name, the reference's, ours) of every tensor whose data type is not the reference's."""
        return [
            (name, t.dtype, self._dtype[name])
            for name, t in self.reference.tensors.items()
            if self._dtype[name] != t.dtype
        ]

    def kept(self) -> dict[str, list[Stored]]:
        """File name -> the reference's tensors that are written, in file order; empty files are left out."""
        left_out = {extra.name for extra in self.store.extras} if self.drop_extra else set()
        shards = {
            name: [t for t in tensors if t.name not in left_out] for name, tensors in self.reference.shards.items()
        }
        return {name: tensors for name, tensors in shards.items() if tensors}

    def extra_sources(self) -> list[Fragment]:
        """The known extras, as they are in the reference."""
        return [self.extra_fragment(extra) for extra in self.extras]

    @staticmethod
    def extra_fragment(extra: Stored) -> Fragment:
        shape = extra.shape or (1,)
        return Fragment(
            label=f"{extra.file.name}: {extra.name}",
            dtype=extra.dtype,
            shape=shape,
            placements=(whole(f"extra:{extra.name}", shape),),
            file=extra.file,
            offset=extra.offset,
        )

    def fragments(self) -> list[Fragment]:
        """The target fragments, without a place yet, in file order."""
        found, self._stored = [], []
        for tensors in self.kept().values():
            for tensor in tensors:
                model = self._model.get(tensor.name)
                made = (
                    self.extra_fragment(tensor)
                    if model is None
                    else replace(model, dtype=self._dtype[tensor.name], cast=self.cast, crc=None)
                )
                found.append(replace(made, file=None, offset=0))
                self._stored.append(tensor)
        return found

    def make_files(self, tmp: Path, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Every safetensors file at full size; the fragments with their places."""
        places: dict[str, tuple[Path, int]] = {}
        for name, tensors in self.kept().items():
            for stored in hffolder.skeleton(tmp / name, self._header(name, tensors)):
                places[stored.name.removeprefix(self.reference.prefix)] = (stored.file, stored.offset)
        return [
            replace(fragment, file=places[stored.name][0], offset=places[stored.name][1])
            for fragment, stored in zip(fragments, self._stored, strict=True)
        ]

    def _header(self, file: str, tensors: Sequence[Stored]) -> bytes:
        raw = self.reference.headers[file]
        unchanged = len(tensors) == len(self.reference.shards[file]) and all(
            self._dtype[t.name] == t.dtype for t in tensors
        )
        if unchanged:
            return raw
        return hffolder.make_header(
            [(self.reference.prefix + t.name, self._dtype[t.name], t.shape) for t in tensors], hffolder.metadata_of(raw)
        )

    def finish(self, tmp: Path, provenance: Mapping[str, Any]) -> list[str]:
        """Everything beside the weights; returns what the reference lacked, as warnings."""
        if self.reference.index is not None:
            self._write_index(tmp)
        copied = copy_files(self.reference.path, tmp, self._change)
        write_atomically(tmp / MARK, json.dumps(provenance, indent=2) + "\n")
        return [
            f"the reference folder has no {what} ({' or '.join(names)}), so the export has none"
            for what, names in EXPECTED_FILES.items()
            if not copied & set(names) and not (what == "chat template" and self._template_in_tokenizer())
        ]

    def _write_index(self, tmp: Path) -> None:
        kept, index = self.kept(), json.loads(json.dumps(self.reference.index))
        sizes = {
            self.reference.prefix + t.name: (
                volume(t.shape),
                t.nbytes // itemsize(t.dtype) * itemsize(self._dtype[t.name]),
            )
            for ts in kept.values()
            for t in ts
        }
        weight_map = {name: file for name, file in index["weight_map"].items() if name in sizes}
        metadata = index.setdefault("metadata", {})
        metadata["total_size"] = sum(size for _, size in sizes.values())
        if "total_parameters" in metadata and len(weight_map) != len(index["weight_map"]):
            dropped = (t for t in self.store.extras)
            metadata["total_parameters"] -= sum(volume(t.shape) for t in dropped)
        changed = {**index, "weight_map": weight_map} != self.reference.index
        if changed:
            write_atomically(tmp / hffolder.INDEX, json.dumps({**index, "weight_map": weight_map}, indent=2) + "\n")
        else:
            shutil.copyfile(self.reference.path / hffolder.INDEX, tmp / hffolder.INDEX)

    def _change(self, name: str, content: Any) -> None:
        self.change(name, content)
        if name == hffolder.CONFIG:
            self._set_dtype(content)

    def _set_dtype(self, config: dict[str, Any]) -> None:
        """Where a data type is stated, state the one that most of the elements have."""
        totals: dict[str, int] = {}
        for name, dtype in self._dtype.items():
            totals[dtype] = totals.get(dtype, 0) + volume(self.reference.tensors[name].shape)
        main = TORCH_NAMES[max(totals, key=totals.get)]
        if main in (config.get("dtype"), config.get("torch_dtype")):
            return
        for section in (config, *(value for value in config.values() if isinstance(value, dict))):
            for key in ("dtype", "torch_dtype"):
                if isinstance(section.get(key), str):
                    section[key] = main

    def _template_in_tokenizer(self) -> bool:
        file = self.reference.path / "tokenizer_config.json"
        return file.is_file() and "chat_template" in json.loads(file.read_text(encoding="utf-8"))


def image_bounds(folder: Path, source: Mapping[str, Any] | None, given: Bounds, say: Callable[[str], None]) -> Change:
    """What puts pixel bounds into the processor's files of `folder`: those given, else those that the `source` of the checkpoint
    says it was trained with. Which ones they are, and why, is told.
    """
    trained = Bounds.of(source or {})
    wanted = given.over(trained)
    if wanted == bounds.UNSAID:
        if source is None or source.get("kind") == "foreign" or "consumed_train_samples" in source:
            say(
                f"image bounds: as in {folder}; the checkpoint does not say what it was trained with "
                "(--image-min-pixels and --image-max-pixels set them)"
            )
        return keep
    stated = Stated.of(folder)
    change, both = stated.writer(wanted), wanted.over(stated.bounds)
    others = (("the checkpoint was trained with", trained.over(both)), ("the reference has", stated.bounds))
    differ = "; ".join(f"{who} {theirs}" for who, theirs in others if theirs != both)
    why = "as the checkpoint was trained" if given == bounds.UNSAID else "as asked for"
    if stated.file:
        say(f"image bounds: {both}, {why}" + (f" ({differ})" if differ else ""))
    return change


def copy_files(path: Path, to: Path, change: Change = keep) -> set[str]:
    """Copy everything of a Hugging Face folder but its weights, JSON without local paths and as `change` edits it.

    Returns the names copied.
    """
    copied = set()
    for file in sorted(path.iterdir()):
        name = file.name
        ours = (hffolder.INDEX, hffolder.EXPERTS_MARK, MARK)
        if name in ours or name.startswith(".") or name.endswith((*hffolder.WEIGHT_SUFFIXES, ".index.json")):
            continue
        if file.is_dir():
            if name == "additional_chat_templates":
                shutil.copytree(file, to / name, dirs_exist_ok=True)
            continue
        text = file.read_text(encoding="utf-8") if name.endswith(".json") and file.stat().st_size < 1 << 20 else None
        changed = _changed_json(name, text, change) if text is not None else None
        if changed is not None:
            write_atomically(to / name, json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
        else:
            shutil.copyfile(file, to / name)
        copied.add(name)
    return copied


def _changed_json(name: str, text: str, change: Change) -> Any | None:
    """The content of a JSON file when it must differ from the reference's: a local path in it, another data type or bound."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    before = json.dumps(content)
    _drop_local_paths(content)
    change(name, content)
    return content if json.dumps(content) != before else None


def _drop_local_paths(content: Any) -> None:
    """Remove `_name_or_path`-like keys that hold a path of the machine that wrote them."""
    if isinstance(content, dict):
        for key in [
            k
            for k, v in content.items()
            if k in ("_name_or_path", "name_or_path") and isinstance(v, str) and v.startswith(("/", ".", "~"))
        ]:
            del content[key]
        for value in content.values():
            _drop_local_paths(value)
    elif isinstance(content, list):
        for value in content:
            _drop_local_paths(value)
