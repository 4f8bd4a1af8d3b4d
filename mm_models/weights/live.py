"""Weights into a live model on any topology: from a Hugging Face folder, from a checkpoint of any layout, or drawn from a seed.

All three go through the weight map, so that a rank's tensors are the same whatever the topology. `load_into` reads only the
bytes this rank needs, by `pread`. It is strict both ways: the rank's tensors are exactly those the map gives it, the source
holds exactly what the model needs, and every element is filled once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mm_models.config.family import family_of, family_of_model
from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.layout import Coords, ModelSplit, ParallelLayout
from mm_models.weights import hffolder, stores
from mm_models.weights.boxes import Placement, Shape, intersect
from mm_models.weights.dtypes import dtype_name, torch_dtype
from mm_models.weights.engine import execute
from mm_models.weights.manifest import Checkpoint, open_checkpoint
from mm_models.weights.model_map import LocalTensor, WeightMap, build
from mm_models.weights.plan import Fragment, plan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded: from where ("hf" or "mm"), which iteration (None: release or Hugging Face), how much was read, what was ignored."""

    kind: str
    folder: Path
    iteration: int | None
    tensors: int
    bytes_read: int
    ignored: tuple[str, ...] = ()


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
        _check_same_model(wmap, theirs, checkpoint)
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
    """Draw this rank's tensors from scratch: each Hugging Face tensor from a generator seeded by (seed, its name).

    Weights are normal with the section's `init_method_std`, biases 0, norms 1, router bias 0; drawn in fp32 and rounded. So
    a model starts from the same bytes on every topology.
    """
    import torch

    family, split = family_of_model(model), split or model.split(layout)
    wmap = build(model, family.prefixes)
    local = wmap.local(coords, layout, split)
    _check_live(tensors, local)
    by_tensor: dict[str, list[LocalTensor]] = {}
    for one in local.values():
        by_tensor.setdefault(one.tensor.canonical, []).append(one)
    stds = {"vision_encoder": model.vision, "vision_projector": model.projector, "text_decoder": model.text}
    with torch.no_grad():
        for hf in wmap.hf("per_expert").values():
            wanted = [
                (tensors[one.name], placement, region, common)
                for placement in hf.placements
                for one in by_tensor.get(placement.tensor, ())
                for region in one.regions
                if (common := intersect(placement.global_box, region.global_box))
            ]
            if not wanted:
                continue
            drawn = _draw(hf.name, hf.view, hf.init, seed, stds[hf.section].init_method_std)
            for live, placement, region, (start, extent) in wanted:
                here, there = _within(start, extent, region), _within(start, extent, placement)
                live[here].copy_(drawn[there])


def _within(start: Shape, extent: Shape, held: Placement) -> tuple[slice, ...]:
    """The slices of a stored tensor that hold the global box `start`/`extent`, which lies inside `held`."""
    return tuple(slice(s - g + at, s - g + at + n) for s, g, at, n in zip(start, held.start, held.local, extent))


def _draw(name: str, shape: tuple[int, ...], init: str, seed: int, std: float) -> torch.Tensor:
    import torch

    if init != "normal":
        return torch.full(shape, {"zeros": 0.0, "ones": 1.0}[init])
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float32) * std


def _check_live(tensors: Mapping[str, torch.Tensor], local: Mapping[str, LocalTensor]) -> None:
    shapes = {name: (tuple(tensors[name].shape), local[name].shape) for name in set(tensors) & set(local)}
    if faults := stores.name_faults(set(tensors), local, shapes):
        raise UserError("this rank's tensors are not those of the weight map: " + "; ".join(faults) + ".")


def _check_same_model(wmap: WeightMap, theirs: WeightMap, checkpoint: Checkpoint) -> None:
    """The checkpoint's model must have the same global tensors, and agree in every number that the forward pass depends on."""
    names = set(theirs.tensors) & set(wmap.tensors)
    faults = stores.name_faults(
        set(theirs.tensors), wmap.tensors, {n: (theirs.tensors[n].shape, wmap.tensors[n].shape) for n in names}
    )
    if faults:
        raise UserError(f"{checkpoint.folder} holds another model than model.json: " + "; ".join(faults) + ".")
    there, here = (dict(_leaves(one.model.model_dump(mode="json"))) for one in (theirs, wmap))
    differs = [
        f"{key} is {here.get(key)!r}, the checkpoint's is {there.get(key)!r}"
        for key in sorted(set(there) | set(here))
        if there.get(key) != here.get(key)
    ]
    if differs:
        raise UserError(f"model.json disagrees with {checkpoint.folder}: " + "; ".join(differs) + ".")


_FREE = ("pipeline_num_layers", "freeze", "loss_cfg", "init_method_std")
"""Keys of model.json that two uses of one checkpoint may set differently."""


def _leaves(config: Mapping, prefix: str = ""):
    for key, value in config.items():
        if key in _FREE:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


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
