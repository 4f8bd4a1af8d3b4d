"""Weights into a live model on any topology: from a Hugging Face folder, from a checkpoint of any layout, or drawn from a seed.

All three go through the weight map, so that a rank's tensors are the same whatever the topology. `load_into` reads only the
bytes this rank needs, by `pread`. It is strict both ways: the rank's tensors are exactly those the map gives it, the source
holds exactly what the model needs, and every element is filled once.

These are the ranks of the Megatron target; boxes of Hugging Face tensors, as the FSDP2 target holds them, are `live_shards`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mm_models.config.family import family_of, family_of_model
from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.layout import Coords, ModelSplit, ParallelLayout
from mm_models.weights import hffolder, stores
from mm_models.weights.boxes import Placement
from mm_models.weights.dtypes import dtype_name, torch_dtype
from mm_models.weights.engine import execute
from mm_models.weights.live_common import LoadReport, check_same_model, draw_into
from mm_models.weights.live_shards import LiveShard, initialise_shards, load_optimizer_shards, load_shards
from mm_models.weights.manifest import Checkpoint, open_checkpoint
from mm_models.weights.model_map import LocalTensor, build
from mm_models.weights.plan import Fragment, plan

if TYPE_CHECKING:
    import torch

__all__ = [
    "LiveShard", "LoadReport", "initialise", "initialise_shards", "load_into", "load_optimizer_shards", "load_shards",
    "require_same_layout",
]  # fmt: skip


def load_into(
    tensors: Mapping[str, torch.Tensor],
    folder: str | Path,
    *,
    model: ModelConfig,
    layout: ParallelLayout,
    coords: Coords,
    split: ModelSplit | None = None,
    iteration: int | str | None = None,
    cast: bool = False,
    verify: bool = True,
    jobs: int = 1,
) -> LoadReport:
    """Fill `tensors` (all parameters and persistent buffers of this rank, by global name) from `folder`.

    `folder` is a Hugging Face folder or a checkpoint of any layout. A tensor that the map holds in fp32 takes a half-precision
    source; any other difference of data type is an error unless `cast`. With `verify`, tensors that are read whole are
    compared with the manifest's CRC.
    """
    import torch

    folder, split, wmap = Path(folder), split or model.split(layout), build(model)
    local = wmap.local(coords, layout, split)
    _check_live(tensors, local)
    if hffolder.is_hf_folder(folder):
        opened = hffolder.open_folder(folder)
        family = family_of(opened.config, str(folder / hffolder.CONFIG))
        family.check_model(model, opened.config, str(folder / hffolder.CONFIG))
        store = stores.hf_store(opened, build(model, family.prefixes), family)
        sources, kind, number, ignored = list(store.fragments), "hf", None, tuple(extra.name for extra in store.extras)
    else:
        checkpoint = open_checkpoint(folder, iteration)
        theirs = build(checkpoint.manifest.model)
        check_same_model(wmap, theirs, checkpoint.folder)
        sources, kind, number, ignored = (
            stores.mm_store(checkpoint, theirs, verify=verify),
            "mm",
            checkpoint.manifest.iteration,
            (),
        )
        folder = checkpoint.folder
    targets, copies = _targets(tensors, local, sources, cast)
    planned = plan(sources, targets, {t.name: t.shape for t in wmap.tensors.values()}, use_all=False)
    result = execute(planned, jobs=jobs, crc=False)
    with torch.no_grad():
        for name, staged in copies.items():
            tensors[name].copy_(staged)
    return LoadReport(
        kind=kind, folder=folder, iteration=number, tensors=len(local), bytes_read=result.bytes_read, ignored=ignored
    )


def require_same_layout(checkpoint: Checkpoint, layout: ParallelLayout, split: ModelSplit, folder: str | Path) -> None:
    """Refuse a checkpoint of another layout, with both layouts and the command that converts it."""
    theirs, degrees = checkpoint.manifest, ("tp", "pp", "vpp", "ep", "etp")
    differs = [
        f"{name} {getattr(theirs.layout, name)} there, {getattr(layout, name)} here"
        for name in degrees
        if getattr(theirs.layout, name) != getattr(layout, name)
    ]
    if not differs and theirs.split == split:
        return
    if theirs.split != split:
        differs.append(f"layers {theirs.split.describe()} there, {split.describe()} here")
    lists = " ".join(
        f"--{flag} '{part.nested()}'"
        for flag, part in (("vit-pp-layers", split.vision), ("llm-pp-layers", split.text))
        if part
    )
    raise UserError(
        f"{checkpoint.folder} has another layout: {'; '.join(differs)}. "
        f"Convert it: mm-convert resplit --mm {folder} --out NEW_FOLDER {layout.flags()} {lists}"
    )


def initialise(
    tensors: Mapping[str, torch.Tensor],
    *,
    model: ModelConfig,
    layout: ParallelLayout,
    coords: Coords,
    seed: int,
    split: ModelSplit | None = None,
) -> None:
    """Draw this rank's tensors from scratch (`draw_into`): a model starts from the same bytes on every topology."""
    family, split = family_of_model(model), split or model.split(layout)
    wmap = build(model, family.prefixes)
    local = wmap.local(coords, layout, split)
    _check_live(tensors, local)
    live: dict[str, list[tuple[torch.Tensor, Placement]]] = {}
    for one in local.values():
        live.setdefault(one.tensor.canonical, []).extend((tensors[one.name], region) for region in one.regions)
    draw_into(wmap, live, seed)


def _check_live(tensors: Mapping[str, torch.Tensor], local: Mapping[str, LocalTensor]) -> None:
    shapes = {name: (tuple(tensors[name].shape), local[name].shape) for name in set(tensors) & set(local)}
    if faults := stores.name_faults(set(tensors), local, shapes):
        raise UserError("this rank's tensors are not those of the weight map: " + "; ".join(faults) + ".")


def _targets(
    tensors: Mapping[str, torch.Tensor], local: Mapping[str, LocalTensor], sources: list[Fragment], cast: bool
):
    """Target fragments over the live tensors' memory, or over staging copies of the source's data type."""
    import torch

    dtypes: dict[str, str] = {}
    for source in sources:
        for placement in source.placements:
            dtypes[placement.tensor] = source.dtype
    targets, staged, faults = [], {}, []
    for name, one in local.items():
        live, have = tensors[name].detach(), dtypes.get(one.tensor.canonical)
        want = dtype_name(live.dtype)
        if have is not None and have != want:
            held = one.tensor.hold == "fp32" and want == "F32" and have in ("BF16", "F16")
            if not (held or cast):
                faults.append(f"{name} is {want} in the model, {have} in the source")
                continue
        if have not in (None, want) or not live.is_contiguous() or live.device.type != "cpu":
            live = staged[name] = torch.empty(one.shape, dtype=torch_dtype(have or want))
        memory = memoryview(live.view(-1).view(torch.uint8).numpy())
        targets.append(Fragment(label=name, dtype=have or want, shape=one.shape, placements=one.regions, memory=memory))
    if faults:
        raise UserError(
            "data types differ: "
            + "; ".join(faults[:8])
            + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
            + ". Set the training data type to the checkpoint's, or allow casting."
        )
    return targets, staged
