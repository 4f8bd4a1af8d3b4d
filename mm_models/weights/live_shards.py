"""Weights into a sharded live model: any box of any Hugging Face tensor, from a Hugging Face folder, a checkpoint of the
Megatron target in any layout, a DCP folder, or drawn from a seed.

A rank reads only the bytes of its boxes. It is strict both ways: the shards are exactly the model's tensors (embedding and
head once when tied), and the source holds exactly what the model needs, by name, shape, data type and expert layout. The
model holds experts `stacked_hf` (E, out, in) or `stacked` (E, in, out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mm_models.config.family import Family, family_of_model
from mm_models.config.model import ModelConfig
from mm_models.config.patterns import matches
from mm_models.errors import UserError
from mm_models.weights import sources, stores
from mm_models.weights.boxes import Placement, Shape, intersect
from mm_models.weights.dcp import folder as dcp_folder
from mm_models.weights.dcp.chunks import box_fragments, moment_of
from mm_models.weights.dcp.writer import optimizer_key
from mm_models.weights.dtypes import dtype_name
from mm_models.weights.engine import execute
from mm_models.weights.live_common import LoadReport, draw_into, grouped
from mm_models.weights.model_map import HfTensor, WeightMap, build
from mm_models.weights.plan import Fragment, plan

if TYPE_CHECKING:
    import torch

STAGED = 1 << 30
"""Bytes that are staged at a time for tensors that cannot be written in place (another device, strides)."""


@dataclass(frozen=True, kw_only=True)
class LiveShard:
    """A box of a Hugging Face tensor: `tensor` is the local box (any device; it may have no elements), `start` where it begins
    in the whole tensor, whose shape in the model's expert layout is `shape`."""

    tensor: torch.Tensor
    start: Shape
    shape: Shape


def load_shards(
    shards: Mapping[str, LiveShard],
    folder: str | Path,
    *,
    model: ModelConfig,
    family: Family | None = None,
    expert_layout: str = "stacked_hf",
    declared_layout: str | None = None,
    dcp_prefix: str = "",
    load_format: str = "auto",
    iteration: int | str | None = None,
    ignore_unexpected: Sequence[str] = (),
    allow_missing: Sequence[str] | None = None,
    verify: bool = True,
    jobs: int = 1,
) -> LoadReport:
    """Fill `shards` (every tensor of the model, by Hugging Face name) from `folder`.

    `expert_layout` is how the model holds experts; `declared_layout` how a DCP folder without manifest does (else the variable
    GLM4V_DCP_3D says it). `load_format` "hf" or "dcp" refuses the other kinds. fp32 tensors take half-precision sources; any
    other difference of data type is an error. `ignore_unexpected` are patterns of tensors of the source to pass over. With
    `allow_missing`, tensors that the source lacks stay as they are where a pattern covers each of them (`unfilled` of the
    report: draw them with `initialise_shards`). With `verify`, items that are read whole are compared with the manifest's CRC.
    """
    family = family or family_of_model(model)
    wmap = build(model, family.prefixes)
    expected = _expected(wmap, expert_layout)
    _check_shards(shards, expected, complete=True)
    source = sources.open_source(
        folder,
        wmap,
        family,
        held_layout=expert_layout,
        declared_layout=declared_layout,
        dcp_prefix=dcp_prefix,
        load_format=load_format,
        iteration=iteration,
        ignore_unexpected=ignore_unexpected,
        partial=allow_missing is not None,
        wanted=_wanted(shards),
        verify=verify,
    )
    unfilled = _unfilled(source, expected, allow_missing or ())
    filled = {name: shard for name, shard in shards.items() if name not in unfilled}
    shapes = {tensor.name: tensor.shape for tensor in wmap.tensors.values()}
    bytes_read = _fill(filled, expected, source.fragments, shapes, jobs)
    return LoadReport(
        kind=source.kind,
        folder=source.folder,
        iteration=source.iteration,
        tensors=len(filled),
        bytes_read=bytes_read,
        ignored=source.ignored,
        unfilled=tuple(unfilled),
    )


def load_optimizer_shards(
    moments: Mapping[str, Mapping[str, LiveShard]],
    folder: str | Path,
    *,
    model: ModelConfig,
    family: Family | None = None,
    expert_layout: str = "stacked_hf",
    iteration: int | str | None = None,
    verify: bool = True,
    jobs: int = 1,
) -> LoadReport:
    """Fill `moments` (Hugging Face name -> `exp_avg`, `exp_avg_sq` -> shard) from the optimizer state of a DCP folder.

    Strict both ways: the folder holds the state of exactly these parameters.
    """
    family = family or family_of_model(model)
    wmap = build(model, family.prefixes)
    expected = _expected(wmap, expert_layout)
    parts: dict[str, dict[str, LiveShard]] = {}
    for name, each in moments.items():
        for part, shard in each.items():
            parts.setdefault(part, {})[name] = shard
    bytes_read, opened = 0, sources.open_optimizer(folder, wmap, expert_layout, iteration)
    sources.check_moments(opened, {part: set(shards) for part, shards in parts.items()}, expected)
    for part, shards in parts.items():
        _check_shards(shards, expected, complete=False)
        tensors = {name: moment_of(expected[name], part) for name in shards}
        held = dcp_folder.fragments(
            opened, tensors, lambda name, part=part: optimizer_key(name, part), wanted=_wanted(shards), verify=verify
        )
        bytes_read += _fill(shards, tensors, held, stores.moment_shapes(wmap), jobs)
    return LoadReport(
        kind="dcp",
        folder=opened.path,
        iteration=opened.iteration,
        tensors=sum(map(len, parts.values())),
        bytes_read=bytes_read,
    )


def initialise_shards(
    shards: Mapping[str, LiveShard],
    *,
    model: ModelConfig,
    seed: int,
    family: Family | None = None,
    expert_layout: str = "stacked_hf",
    complete: bool = True,
) -> None:
    """Draw `shards` from scratch, the same values as the Megatron target's `initialise` on any topology.

    All tensors of the model must be there, unless `complete` is false (to draw what a source lacks).
    """
    family = family or family_of_model(model)
    wmap = build(model, family.prefixes)
    expected = _expected(wmap, expert_layout)
    _check_shards(shards, expected, complete=complete)
    live: dict[str, list[tuple[torch.Tensor, Placement]]] = {}
    for name, shard in shards.items():
        tensor = shard.tensor.detach()
        for fragment in _fragments(expected[name], shard, "F32", memory=None):
            seen = tensor.transpose(-1, -2) if fragment.transposed else tensor
            for placement in fragment.placements:
                live.setdefault(placement.tensor, []).append((seen, placement))
    draw_into(wmap, live, seed)


# --- accounting ---------------------------------------------------------------------------------------------------


def _expected(wmap: WeightMap, expert_layout: str) -> dict[str, HfTensor]:
    if expert_layout not in sources.HELD_LAYOUTS:
        raise UserError(f"the model cannot hold experts {expert_layout}; it holds {' or '.join(sources.HELD_LAYOUTS)}.")
    return wmap.hf(expert_layout)


def _check_shards(shards: Mapping[str, LiveShard], expected: Mapping[str, HfTensor], *, complete: bool) -> None:
    shapes = {name: (shards[name].shape, expected[name].shape) for name in set(shards) & set(expected)}
    needed = expected if complete else {name: expected[name] for name in shapes}
    if faults := stores.name_faults(set(shards), needed, shapes):
        raise UserError("the live tensors are not those of the weight map: " + "; ".join(faults) + ".")
    for name, shard in shards.items():
        local = tuple(shard.tensor.shape)
        if shard.tensor.numel() and any(
            s < 0 or s + n > m for s, n, m in zip(shard.start, local, shard.shape, strict=True)
        ):
            raise UserError(f"{name}: a box {local} at {shard.start} does not lie in {shard.shape}.")


def _unfilled(
    source: sources.Source, expected: Mapping[str, HfTensor], allow_missing: Sequence[str]
) -> dict[str, None]:
    """The model's tensors that the source lacks in part or whole; refused unless each is covered by a pattern."""
    if not source.missing:
        return {}
    lacking: dict[str, list[tuple[Shape, Shape]]] = {}
    for tensor in source.missing.values():
        for placement in tensor.placements:
            lacking.setdefault(placement.tensor, []).append(placement.global_box)
    found = {
        name: None
        for name, tensor in expected.items()
        if any(intersect(p.global_box, box) for p in tensor.placements for box in lacking.get(p.tensor, ()))
    }
    names = ", ".join(list(source.missing)[:8]) + (", ..." if len(source.missing) > 8 else "")
    if bare := [name for name in found if not matches(allow_missing, name)]:
        shown = ", ".join(bare[:8]) + (", ..." if len(bare) > 8 else "")
        raise UserError(
            f"{source.folder} lacks {names}; allow_missing ({', '.join(allow_missing) or 'empty'}) does not cover {shown}."
        )
    return found


# --- filling ------------------------------------------------------------------------------------------------------


def _wanted(shards: Mapping[str, LiveShard]):
    """Whether a box of a tensor in the model's layout meets this rank's."""

    def wanted(name: str, box: tuple[Shape, Shape]) -> bool:
        shard = shards.get(name)
        if shard is None or not shard.tensor.numel():
            return False
        return not shard.shape or intersect((shard.start, tuple(shard.tensor.shape)), box) is not None

    return wanted


def _fragments(tensor: HfTensor, shard: LiveShard, dtype: str, memory: memoryview | None) -> list[Fragment]:
    if not shard.tensor.numel():
        return []
    box = (tuple(shard.start), tuple(shard.tensor.shape))
    return box_fragments(tensor, box, label=tensor.name, dtype=dtype, memory=memory, cast=True)


def _fill(
    shards: Mapping[str, LiveShard],
    expected: Mapping[str, HfTensor],
    held: Sequence[Fragment],
    shapes: Mapping[str, Shape],
    jobs: int,
) -> int:
    """Read every shard; returns the bytes read. Tensors that cannot be written in place go through bounded staging copies."""
    import torch

    _check_dtypes(shards, expected, {p.tensor: fragment.dtype for fragment in held for p in fragment.placements})
    read = 0
    sizes = ((name, _staged(shard)) for name, shard in shards.items() if shard.tensor.numel())
    for group in grouped(sizes, STAGED):
        targets, staged = [], {}
        for name in group:
            live = shards[name].tensor.detach()
            if not _in_place(live):
                live = staged[name] = torch.empty(live.shape, dtype=live.dtype)
            memory = memoryview(live.view(-1).view(torch.uint8).numpy())
            targets += _fragments(expected[name], shards[name], dtype_name(live.dtype), memory)
        tensors = {placement.tensor for target in targets for placement in target.placements}
        used = [fragment for fragment in held if any(p.tensor in tensors for p in fragment.placements)]
        read += execute(plan(used, targets, shapes, use_all=False), jobs=jobs, crc=False).bytes_read
        with torch.no_grad():
            for name, copy in staged.items():
                shards[name].tensor.detach().copy_(copy)
    return read


def _in_place(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _staged(shard: LiveShard) -> int:
    """Bytes of the staging copy that a shard needs."""
    live = shard.tensor
    return 0 if _in_place(live) else live.numel() * live.element_size()


def _check_dtypes(shards: Mapping[str, LiveShard], expected: Mapping[str, HfTensor], dtypes: Mapping[str, str]) -> None:
    faults = []
    for name, shard in shards.items():
        want = dtype_name(shard.tensor.dtype)
        have = {dtypes[p.tensor] for p in expected[name].placements if p.tensor in dtypes}
        if want == "F32":
            have -= {"BF16", "F16"}
        if have - {want}:
            faults.append(f"{name} is {want} in the model, {' and '.join(sorted(have - {want}))} in the source")
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise UserError(f"data types differ: {'; '.join(faults[:8])}{more}. Only half precision is widened, to fp32.")
