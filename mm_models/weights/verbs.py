"""The conversions: Hugging Face to checkpoint, checkpoint to Hugging Face, checkpoint to checkpoint of another layout.

Each verb opens its source from headers alone, describes its target, proves the plan (every source element used, every
target element written once), and only then makes files, under a temporary name: an interrupted or refused run leaves
nothing that loads. Data types stay as they are. `Report` is the closing line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_models.config.family import family_of, family_of_model
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.split import with_split, without_split
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.weights import hffolder, stores
from mm_models.weights.conversion import (
    Options,
    Report,
    Say,
    check_converter,
    dtypes,
    export,
    peak_rss,
    refuse_same,
    tell_unread,
    to_mm,
)
from mm_models.weights.manifest import Checkpoint
from mm_models.weights.model_map import build
from mm_models.weights.optimizer_file import read_head
from mm_models.weights.output import MmOutput

__all__ = ["Options", "Report", "Target", "hf_to_mm", "mm_to_hf", "peak_rss", "resplit"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The layout asked for, with optional layer lists."""

    layout: ParallelLayout
    vision_layers: object = None
    text_layers: object = None

    def split(self, model: ModelConfig, say: Say) -> ModelSplit:
        """The stage split, everything that must divide checked; one that was not asked for is printed."""
        model.check_layout(self.layout)
        split = model.split(self.layout, vision_layers=self.vision_layers, text_layers=self.text_layers)
        if self.layout.pp > 1 and None in (self.vision_layers, self.text_layers):
            say(f"layers per stage: {split.describe()}")
        return split


# --- Hugging Face -> checkpoint -----------------------------------------------------------------------------------


def hf_to_mm(
    hf: str | Path,
    out: str | Path,
    target: Target,
    *,
    model_json: str | Path | None = None,
    converter: str | None = None,
    options: Options,
) -> Report:
    """Convert the Hugging Face folder `hf` to a release checkpoint in `out`, with its `model.json`.

    With `model_json` the model comes from that file, refused where it disagrees with config.json.
    """
    folder = hffolder.open_folder(hf)
    where = str(folder.path / hffolder.CONFIG)
    family = family_of(folder.config, where)
    check_converter(converter, family, folder.path)
    if model_json is not None:
        model = load_model_config(model_json)
        family.check_model(model, folder.config, where)
        _check_lists(model, target, str(model_json))
    else:
        model = family.model(folder.config, where)
    tell_unread(family, folder.config, where, options.say)
    split = target.split(model, options.say)
    wmap = build(with_split(model, split), family.prefixes)
    store = stores.hf_store(folder, wmap, family)
    if store.extras:
        options.say(f"ignored, {len(store.extras)} known extras: {', '.join(extra.name for extra in store.extras)}")
    output = MmOutput(
        wmap=wmap,
        layout=target.layout,
        split=split,
        dtypes=dtypes(store.fragments),
        source={
            "kind": "huggingface",
            "folder": folder.path.name,
            "expert_layout": store.expert_layout,
            "ignored": [e.name for e in store.extras],
        },
    )
    return to_mm(output, store.fragments, Path(out), options)


def _check_lists(model: ModelConfig, target: Target, where: str) -> None:
    """Layer lists given beside a model.json that has its own must be the same."""
    for given, section, name in (
        (target.text_layers, model.text, "llm_pp_layers"),
        (target.vision_layers, model.vision, "vit_pp_layers"),
    ):
        stated = section and section.pipeline_num_layers
        if given and stated and _flat(given) != _flat(stated):
            raise UserError(f"{name} is {given}, {where} says {stated}. Leave the option out, or correct one of them.")


def _flat(lists: object) -> list:
    return [count for row in lists for count in (row if isinstance(row, list) else [row])]


# --- checkpoint -> checkpoint -------------------------------------------------------------------------------------


def resplit(
    source: Checkpoint, out: str | Path, target: Target, *, converter: str | None = None, options: Options
) -> Report:
    """Write the checkpoint `source` in another layout, with optimizer state (as one data-parallel rank) and training position.

    Random states belong to ranks that no longer exist; they are left out.
    """
    manifest = source.manifest
    check_converter(converter, family_of_model(manifest.model), source.folder)
    if (target.layout.pp, target.layout.vpp) == (manifest.layout.pp, manifest.layout.vpp):
        target = replace(
            target,
            vision_layers=target.vision_layers or (manifest.split.vision and manifest.split.vision.nested()),
            text_layers=target.text_layers or (manifest.split.text and manifest.split.text.nested()),
        )
    bare = without_split(manifest.model)
    split = target.split(bare, options.say)
    wmap = build(with_split(bare, split))
    refuse_same(source.folder, Path(out) / source.folder.name)
    weights, moments = (
        stores.mm_store(source, build(manifest.model)),
        stores.optimizer_store(source, build(manifest.model)),
    )
    head = read_head(source, options.say)
    output = MmOutput(
        wmap=wmap,
        layout=target.layout,
        split=split,
        dtypes=dtypes(weights),
        iteration=manifest.iteration,
        extra=_training_position(source),
        source={**manifest.source, "resplit_from": manifest.layout.flags()},
        optimizer=head,
    )
    return to_mm(output, [*weights, *moments], Path(out), options)


def _training_position(source: Checkpoint) -> dict[str, Any]:
    """What a training checkpoint's dense files hold beside tensors: arguments, scheduler, samples consumed."""
    from mm_models.weights import ptfile

    manifest = source.manifest
    files = sorted({entry.file for entry in manifest.tensors if not entry.file.startswith("expert_")})
    if not files or manifest.iteration is None or manifest.source.get("kind") == "foreign":
        return {}
    content, _ = ptfile.scan(source.folder / files[0])
    return {
        key: value
        for key, value in content.items()
        if not key.startswith("model") and not _holds_tensor(value) and key != "rng_state"
    }


def _holds_tensor(value: Any) -> bool:
    from mm_models.weights.ptfile import Spec

    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, Spec)


# --- checkpoint -> Hugging Face -----------------------------------------------------------------------------------


def mm_to_hf(
    source: Checkpoint,
    hf: str | Path,
    out: str | Path,
    *,
    like_reference: bool = False,
    drop_extra: bool = False,
    converter: str | None = None,
    options: Options,
) -> Report:
    """Export a checkpoint as a complete Hugging Face folder in the image of the reference folder `hf`."""
    manifest = source.manifest
    reference = hffolder.open_folder(hf)
    where = str(reference.path / hffolder.CONFIG)
    family = family_of(reference.config, where)
    check_converter(converter, family, reference.path)
    family.check_model(manifest.model, reference.config, where)
    wmap = build(manifest.model, family.prefixes)
    store = stores.hf_store(reference, wmap, family)
    weights = stores.mm_store(source, wmap)
    provenance = {"iteration": manifest.iteration, "flags": manifest.layout.flags()}
    return export(
        weights,
        reference,
        store,
        wmap,
        out,
        provenance,
        source=manifest.source,
        like_reference=like_reference,
        drop_extra=drop_extra,
        options=options,
    )
