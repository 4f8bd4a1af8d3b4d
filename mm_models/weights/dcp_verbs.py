"""The conversions of DCP checkpoints: from and to Hugging Face folders, from and to checkpoints of the Megatron target.

A DCP folder says its expert layout and key prefix in its manifest; a folder of the field has none, so both are declared and
then checked. Data types stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_models.config.family import Family, family_of, family_of_model
from mm_models.config.model import ModelConfig
from mm_models.config.split import with_split, without_split
from mm_models.errors import UserError
from mm_models.weights import hffolder, hfoutput, mmfolder, sources, stores
from mm_models.weights.conversion import (
    Options,
    Report,
    check_converter,
    dtypes,
    export,
    proven,
    refuse_same,
    report,
    run,
    tell_unread,
    temporary,
    to_mm,
)
from mm_models.weights.dcp import folder as dcp_folder
from mm_models.weights.dcp import layouts
from mm_models.weights.dcp.folder import DcpFolder
from mm_models.weights.dcp.output import DcpOutput, refuse_foreign_output
from mm_models.weights.dcp.writer import weight_key
from mm_models.weights.hffolder import HfFolder
from mm_models.weights.manifest import Checkpoint
from mm_models.weights.model_map import WeightMap, build
from mm_models.weights.output import MmOutput, need_space
from mm_models.weights.plan import Fragment
from mm_models.weights.verbs import Target


def hf_to_dcp(
    hf: str | Path,
    out: str | Path,
    *,
    expert_layout: str | None = None,
    by_variable: bool = False,
    dcp_prefix: str = "",
    hf_prefix: str = "",
    converter: str | None = None,
    options: Options,
) -> Report:
    """Convert a Hugging Face folder to a DCP release in `out`, with config, tokenizer and processor files beside it.

    Without `expert_layout` experts lie as the FSDP2 target trains them or, `by_variable`, as the seeds' variable says.
    """
    folder, family, model = _opened(hf, hf_prefix, converter)
    tell_unread(family, folder.config, str(folder.path / hffolder.CONFIG), options.say)
    wmap = build(model, family.prefixes)
    store = stores.hf_store(folder, wmap, family)
    if store.extras:
        options.say(f"ignored, {len(store.extras)} known extras: {', '.join(extra.name for extra in store.extras)}")
    source = {
        "kind": "huggingface",
        "folder": folder.path.name,
        "expert_layout": store.expert_layout,
        "ignored": [extra.name for extra in store.extras],
    }
    layout = layouts.chosen(expert_layout, wmap, by_variable=by_variable)
    return _to_dcp(store.fragments, wmap, out, layout, dcp_prefix, folder.path, source, options)


def mm_to_dcp(
    source: Checkpoint,
    out: str | Path,
    *,
    hf: str | Path | None,
    expert_layout: str | None = None,
    dcp_prefix: str = "",
    converter: str | None = None,
    options: Options,
) -> Report:
    """Convert the weights of a Megatron checkpoint to a DCP release; the files of the Hugging Face folder `hf` go beside it."""
    model = without_split(source.manifest.model)
    family = family_of_model(model)
    check_converter(converter, family, source.folder)
    change = hfoutput.keep
    if hf is not None:
        reference, theirs, _ = _opened(hf, "", converter)
        theirs.check_model(model, reference.config, str(reference.path / hffolder.CONFIG))
        change = hfoutput.image_bounds(reference.path, source.manifest.source, options.bounds, options.say)
    else:
        options.say("no --hf folder: config, tokenizer and processor files are not put beside the checkpoint")
    if source.manifest.optimizer:
        options.say(f"{source.folder}: its optimizer state is not converted")
    said = {**source.manifest.source, "mm": source.manifest.layout.flags(), "mm_iteration": source.manifest.iteration}
    weights, wmap = stores.mm_store(source, build(source.manifest.model)), build(model, family.prefixes)
    layout = layouts.chosen(expert_layout, wmap)
    return _to_dcp(weights, wmap, out, layout, dcp_prefix, None if hf is None else Path(hf), said, options, change)


def dcp_to_hf(
    dcp: str | Path,
    hf: str | Path,
    out: str | Path,
    *,
    expert_layout: str | None = None,
    dcp_prefix: str | None = None,
    hf_prefix: str = "",
    iteration: int | str | None = None,
    like_reference: bool = False,
    drop_extra: bool = False,
    converter: str | None = None,
    options: Options,
) -> Report:
    """Export a DCP checkpoint as a complete Hugging Face folder in the image of the reference folder `hf`."""
    reference, family, model = _opened(hf, hf_prefix, converter)
    wmap = build(model, family.prefixes)
    store = stores.hf_store(reference, wmap, family)
    opened = Opened.of(dcp, wmap, family, expert_layout, dcp_prefix, iteration)
    refuse_same(opened.folder.path, Path(out))
    provenance = {
        "iteration": opened.folder.iteration,
        "expert_layout": opened.expert_layout,
        "dcp": opened.folder.path.name,
    }
    return export(
        opened.fragments,
        reference,
        store,
        wmap,
        out,
        provenance,
        source=opened.source,
        like_reference=like_reference,
        drop_extra=drop_extra,
        options=options,
    )


def dcp_to_mm(
    dcp: str | Path,
    out: str | Path,
    target: Target,
    *,
    model_json: str | Path | None = None,
    expert_layout: str | None = None,
    dcp_prefix: str | None = None,
    iteration: int | str | None = None,
    converter: str | None = None,
    options: Options,
) -> Report:
    """Convert the weights of a DCP checkpoint to a release checkpoint of the Megatron target in any layout."""
    family, model = dcp_folder.model_of(dcp_folder.open_dcp(dcp, iteration), model_json)
    check_converter(converter, family, Path(dcp))
    split = target.split(model, options.say)
    wmap = build(with_split(model, split), family.prefixes)
    opened = Opened.of(dcp, build(model, family.prefixes), family, expert_layout, dcp_prefix, iteration)
    if dcp_folder.present_moments(opened.folder):
        options.say(f"{opened.folder.path}: its optimizer state is not converted")
    output = MmOutput(
        wmap=wmap,
        layout=target.layout,
        split=split,
        dtypes=dtypes(opened.fragments),
        source={
            **(opened.source or {}),
            "kind": "dcp",
            "folder": opened.folder.path.name,
            "expert_layout": opened.expert_layout,
        },
    )
    return to_mm(output, opened.fragments, Path(out), options)


# --- common -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A DCP checkpoint that holds exactly a model, as fragments."""

    folder: DcpFolder
    expert_layout: str
    fragments: list[Fragment]

    @property
    def source(self) -> Mapping[str, Any] | None:
        """Where the manifest says the weights came from."""
        return self.folder.manifest and self.folder.manifest.source

    @staticmethod
    def of(
        dcp: str | Path,
        wmap: WeightMap,
        family: Family,
        expert_layout: str | None,
        dcp_prefix: str | None,
        iteration: int | str | None,
    ) -> Opened:
        """Refused: a prefix or expert layout (given, or by the seeds' variable) that is not what the manifest says."""
        folder = dcp_folder.open_dcp(dcp, iteration)
        prefix = _prefix(folder, dcp_prefix)
        if wmap.has_experts and layouts.from_variable() == "stacked" and expert_layout is None:
            expert_layout = "stacked"
            said = folder.manifest.expert_layout if folder.manifest is not None else expert_layout
            if said != expert_layout:
                raise UserError(
                    f"{folder.path}: its manifest says expert layout {said}, but {layouts.VARIABLE}=1 says stacked. "
                    f"Unset {layouts.VARIABLE}."
                )
        names = sources.dcp_names(folder, wmap, family, declared_layout=expert_layout, dcp_prefix=prefix)
        return Opened(
            folder=folder,
            expert_layout=names.expert_layout,
            fragments=dcp_folder.fragments(folder, names.expected, lambda name: weight_key(name, prefix)),
        )


def _prefix(folder: DcpFolder, given: str | None) -> str:
    said = folder.manifest.dcp_prefix if folder.manifest is not None else None
    if said is not None and given not in (None, said):
        raise UserError(
            f"{folder.path}: its manifest says dcp_prefix {said!r}, but {given!r} was given. Leave the option out, or correct it."
        )
    return said if said is not None else given or ""


def _opened(hf: str | Path, prefix: str, converter: str | None) -> tuple[HfFolder, Family, ModelConfig]:
    folder = hffolder.open_folder(hf, prefix)
    where = str(folder.path / hffolder.CONFIG)
    family = family_of(folder.config, where)
    check_converter(converter, family, folder.path)
    return folder, family, family.model(folder.config, where)


def _to_dcp(
    weights: list[Fragment] | tuple[Fragment, ...],
    wmap: WeightMap,
    out: str | Path,
    expert_layout: str,
    dcp_prefix: str,
    beside: Path | None,
    source: Mapping[str, Any],
    options: Options,
    change: hfoutput.Change = hfoutput.keep,
) -> Report:
    out = Path(out)
    output = DcpOutput(
        wmap=wmap,
        expert_layout=expert_layout,
        dcp_prefix=dcp_prefix,
        dtypes=dtypes(weights),
        beside=beside,
        change=change,
        source=source,
    )
    fragments = output.fragments()
    planned = proven(weights, fragments, wmap)
    stores.check_replicas(planned.replicas)
    if beside is not None:
        refuse_same(beside, out)
    refuse_foreign_output(out)
    need_space(out, planned.bytes_written)
    with temporary(mmfolder.begin(out, None, overwrite=options.overwrite)) as tmp:
        located = output.make_files(tmp, fragments)
        result, seconds = run(replace(planned, targets=located), options, crc=True)
        output.finish(tmp, result.crcs)
    said = expert_layout if wmap.has_experts else None
    return replace(report(out, fragments, result, seconds), expert_layout=said)
