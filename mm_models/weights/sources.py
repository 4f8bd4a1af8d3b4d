"""A folder of any kind as a source for a live model: its kind found, its names accounted for, its tensors as fragments.

    "hf"   a Hugging Face folder, per expert or stacked
    "mm"   a checkpoint of the Megatron target, any layout
    "dcp"  a DCP folder or its parent, experts in the layout that the model holds

Refused: another kind than the one asked for; another model; tensors missing, unexpected or of another shape; a DCP folder whose
key prefix or expert layout is not the expected one, with the command that mends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mm_models.config.family import Family, family_of
from mm_models.config.patterns import matches
from mm_models.errors import UserError
from mm_models.weights import hffolder, stores
from mm_models.weights.boxes import Shape
from mm_models.weights.dcp import folder as dcp_folder
from mm_models.weights.dcp import layouts
from mm_models.weights.dcp.folder import DcpFolder
from mm_models.weights.dcp.writer import WEIGHTS, weight_key
from mm_models.weights.live_common import check_same_model
from mm_models.weights.manifest import open_checkpoint
from mm_models.weights.model_map import HfTensor, WeightMap, build
from mm_models.weights.plan import Fragment

HELD_LAYOUTS = ("stacked_hf", "stacked")
"""How a model may hold experts."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened folder. `missing` are tensors it lacks, in its own layout; `ignored` what it holds beside the model."""

    kind: str
    folder: Path
    iteration: int | None
    fragments: Sequence[Fragment]
    missing: Mapping[str, HfTensor] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def kind_of(folder: str | Path) -> str:
    """What `folder` is: a DCP folder or its parent, which may have a config.json beside it; a Hugging Face folder; or else "mm"."""
    path = Path(folder)
    if dcp_folder.is_dcp(path):
        return "dcp"
    return "hf" if hffolder.is_hf_folder(path) and any(path.glob("*.safetensors")) else "mm"


def open_source(
    folder: str | Path,
    wmap: WeightMap,
    family: Family,
    *,
    held_layout: str,
    declared_layout: str | None,
    dcp_prefix: str,
    load_format: str,
    iteration: int | str | None,
    ignore_unexpected: Sequence[str],
    partial: bool,
    wanted: dcp_folder.Wanted | None,
    verify: bool,
) -> Source:
    """`folder` as a source. With `partial`, tensors it lacks are told and not refused: which of them may be is the caller's."""
    assert load_format in ("auto", "hf", "dcp"), load_format
    path = Path(folder)
    kind = kind_of(path)
    if kind == "mm" and load_format == "auto" and path.is_dir() and hffolder.is_hf_folder(path):
        kind = "hf"  # config.json alone: the refusal names the weights that are not there
    if load_format == "hf" or (load_format == "auto" and kind == "hf"):
        if kind == "dcp":
            raise UserError(f"{path}: a DCP checkpoint, but load_format is hf. Set load_format dcp or auto.")
        return _hugging_face(path, wmap, family, ignore_unexpected, partial)
    if load_format == "dcp" or kind == "dcp":
        if kind == "hf":
            raise UserError(f"{path}: a Hugging Face folder, but load_format is dcp. Set load_format hf or auto.")
        opened = dcp_folder.open_dcp(path, iteration)
        names = dcp_names(
            opened,
            wmap,
            family,
            declared_layout=declared_layout,
            dcp_prefix=dcp_prefix,
            ignore_unexpected=ignore_unexpected,
            partial=partial,
        )
        _check_held(opened, wmap, names, held_layout, dcp_prefix)
        return Source(
            kind="dcp",
            folder=opened.path,
            iteration=opened.iteration,
            fragments=dcp_folder.fragments(
                opened, names.expected, lambda name: weight_key(name, dcp_prefix), wanted=wanted, verify=verify
            ),
            missing=names.missing,
            ignored=names.ignored,
        )
    checkpoint = open_checkpoint(path, iteration)
    theirs = build(checkpoint.manifest.model)
    check_same_model(wmap, theirs, checkpoint.folder)
    return Source(
        kind="mm",
        folder=checkpoint.folder,
        iteration=checkpoint.manifest.iteration,
        fragments=stores.mm_store(checkpoint, theirs, verify=verify),
    )


def _hugging_face(
    path: Path, wmap: WeightMap, family: Family, ignore_unexpected: Sequence[str], partial: bool
) -> Source:
    opened = hffolder.open_folder(path)
    where = str(path / hffolder.CONFIG)
    named = family_of(opened.config, where)
    named.check_model(wmap.model, opened.config, where)
    store = stores.hf_store(opened, wmap, family, partial=partial, ignore=_ignorer(ignore_unexpected))
    extras = tuple(extra.name for extra in store.extras)
    return Source(
        kind="hf",
        folder=path,
        iteration=None,
        fragments=store.fragments,
        missing=store.missing,
        ignored=(*extras, *store.ignored),
    )


def _ignorer(patterns: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: matches(patterns, name)


# --- DCP ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DcpNames:
    """What a DCP folder holds of a model: in which layout, what it lacks, what it holds beside."""

    expert_layout: str
    expected: Mapping[str, HfTensor]
    missing: Mapping[str, HfTensor]
    ignored: tuple[str, ...]


def dcp_layout(folder: DcpFolder, wmap: WeightMap, declared_layout: str | None) -> tuple[str, str]:
    """(expert layout of a DCP folder, who says so): its manifest, else what was declared, else the variable.

    Without experts all layouts are one, and none may be declared.
    """
    if not wmap.has_experts:
        return layouts.without_experts(declared_layout), "the model has no experts"
    if folder.manifest is None:
        said = "it was declared" if declared_layout else f"{layouts.VARIABLE}; the folder has no manifest"
        return layouts.declared(declared_layout), said
    found = folder.manifest.expert_layout
    if declared_layout not in (None, found):
        raise UserError(
            f"{folder.path}: its manifest says expert layout {found}, but {declared_layout} was asked for. "
            f"Ask for {found}. {layouts.reconvert(folder.path, declared_layout, have=found)}"
        )
    return found, "its manifest says so"


def dcp_names(
    folder: DcpFolder,
    wmap: WeightMap,
    family: Family,
    *,
    declared_layout: str | None,
    dcp_prefix: str,
    ignore_unexpected: Sequence[str] = (),
    partial: bool = False,
) -> DcpNames:
    """Account for every weight of a DCP folder. Refused: another model, prefix, layout, shape; names that are not the model's."""
    if folder.manifest is not None:
        check_same_model(wmap, build(folder.manifest.model), folder.path)
    every = {name: None for expert_layout in ("stacked_hf", "per_expert") for name in wmap.hf(expert_layout)}
    dcp_folder.check_prefix(folder, every, dcp_prefix)
    held = {
        name.removeprefix(dcp_prefix): tensor for name, tensor in folder.weights.items() if name.startswith(dcp_prefix)
    }
    expert_layout, said = dcp_layout(folder, wmap, declared_layout)
    shapes: dict[str, Shape] = {name: tensor.shape for name, tensor in held.items()}
    layouts.check_shapes(shapes, wmap, expert_layout, folder=folder.path, dcp_prefix=dcp_prefix, said=said)
    expected = wmap.hf(expert_layout)
    ignore = _ignorer(ignore_unexpected)
    beside = {name for name in held if name not in expected}
    ignored = sorted(name for name in beside if family.is_extra(name, wmap.model) or ignore(name))
    blobs = [key for key in folder.metadata.blobs if key.startswith(WEIGHTS)]
    missing = {name: tensor for name, tensor in expected.items() if name not in held} if partial else {}
    needed = {name: tensor for name, tensor in expected.items() if name not in missing}
    common = {name: (shapes[name], tensor.shape) for name, tensor in needed.items() if name in held}
    if faults := stores.name_faults(set(held) - set(ignored), needed, common):
        raise UserError(f"{folder.path} does not hold this model: " + "; ".join(faults) + ".")
    return DcpNames(expert_layout=expert_layout, expected=needed, missing=missing, ignored=(*ignored, *blobs))


def _check_held(folder: DcpFolder, wmap: WeightMap, names: DcpNames, held_layout: str, dcp_prefix: str) -> None:
    """A model is loaded from files in its own expert layout only."""
    if names.expert_layout == held_layout or not wmap.has_experts:
        return
    theirs, ours = (_an_expert(wmap, layout) for layout in (names.expert_layout, held_layout))
    other = f" Or set model.expert_layout to {names.expert_layout}." if names.expert_layout in HELD_LAYOUTS else ""
    raise UserError(
        f"{folder.path}: experts are {names.expert_layout} there ({theirs}), {held_layout} in the model "
        f"({ours}). {layouts.reconvert(folder.path, held_layout, dcp_prefix, names.expert_layout)}.{other}"
    )


def _an_expert(wmap: WeightMap, expert_layout: str) -> str:
    """Name and shape of some expert tensor in a layout."""
    name = sorted(layouts.expert_names(wmap, expert_layout))[0]
    return f"{name} {wmap.hf(expert_layout)[name].shape}"


# --- optimizer state ----------------------------------------------------------------------------------------------


def open_optimizer(folder: str | Path, wmap: WeightMap, held_layout: str, iteration: int | str | None) -> DcpFolder:
    """A DCP folder with optimizer state of this model, experts in the layout that the model holds."""
    opened = dcp_folder.open_dcp(folder, iteration)
    if opened.manifest is not None:
        check_same_model(wmap, build(opened.manifest.model), opened.path)
        if wmap.has_experts and opened.manifest.expert_layout != held_layout:
            raise UserError(
                f"{opened.path}: experts are {opened.manifest.expert_layout} there, {held_layout} in the model. "
                f"Set model.expert_layout to {opened.manifest.expert_layout}."
            )
    if not dcp_folder.present_moments(opened):
        raise UserError(f"{opened.path}: holds no optimizer state. Load with no_load_optim, or from another iteration.")
    return opened


def check_moments(folder: DcpFolder, wanted: Mapping[str, set[str]], expected: Mapping[str, HfTensor]) -> None:
    """Refuse unless the folder has the moments `wanted` (part -> names), with the parameters' shapes, and no others."""
    faults, held = [], folder.moments
    for part, names in wanted.items():
        there = held.get(part, {})
        shapes = {name: (there[name].shape, expected[name].shape) for name in names & set(there)}
        faults += [f"{part}: {fault}" for fault in stores.name_faults(set(there), dict.fromkeys(names), shapes)]
    if faults:
        raise UserError(f"{folder.path} does not hold this optimizer's state: " + "; ".join(faults) + ".")
