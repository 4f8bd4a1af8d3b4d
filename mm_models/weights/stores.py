"""The places weights live in, as fragments of global tensors: a Hugging Face folder, a checkpoint folder, its optimizer state.

Each function accounts for every name before it returns: a tensor that is missing, unexpected or of another shape is refused
with all such names in one error. Known extras of a family are set aside by name, for the caller to print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mm_models.config.family import Family
from mm_models.errors import UserError, nearest
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.weights import mmfolder
from mm_models.weights.boxes import Placement, Shape, flat_range
from mm_models.weights.hffolder import CONFIG, HfFolder, Stored
from mm_models.weights.manifest import Checkpoint
from mm_models.weights.model_map import HfTensor, LocalTensor, WeightMap, build, shard_coords
from mm_models.weights.plan import Fragment
from mm_models.weights.rules import EXPERT_LAYOUTS

PARTS = ("master", "exp_avg", "exp_avg_sq")


# --- Hugging Face folders -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HfStore:
    """The tensors of a folder that the model uses, the expert layout they are in (None without experts), the known extras set
    aside, and the second copies: the head of a tied model, equal to the embedding.

    `missing` and `ignored` are empty unless they were allowed.
    """

    fragments: tuple[Fragment, ...]
    expert_layout: str | None
    extras: tuple[Stored, ...]
    copies: tuple[Fragment, ...] = ()
    missing: Mapping[str, HfTensor] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def hf_store(
    folder: HfFolder,
    wmap: WeightMap,
    family: Family,
    *,
    partial: bool = False,
    merged: bool = False,
    ignore: Callable[[str], bool] = lambda name: False,
) -> HfStore:
    """Every tensor of `folder` as a fragment; refused unless the folder holds exactly what the model needs, and known extras.

    `wmap` has the family's own prefixes; the folder may have older ones, part by part. A tied model's folder may hold
    its head all the same, if it is the embedding bit by bit. With `partial` tensors may be missing; `ignore` says which further
    ones may be there. A folder whose experts `moe_expert` merged into another orientation than Hugging Face's is refused, also
    when the shapes agree, unless `merged`.
    """
    if folder.expert_layout is not None and not merged:
        raise UserError(
            f"{folder.path}: its experts are merged as {folder.expert_layout}, expected Hugging Face's own layouts. "
            f"Split them: mm-convert moe_expert --style split --hf_dir {folder.path} --save_dir NEW_FOLDER"
        )
    wmap = spelled(wmap, family, folder)
    maps = {expert_layout: wmap.hf(expert_layout) for expert_layout in EXPERT_LAYOUTS}
    expert_layout = folder.expert_layout or _expert_layout(folder, maps)
    expected = maps[expert_layout] if expert_layout in maps else wmap.hf(expert_layout)
    copies = {name: tensor for name, tensor in wmap.hf_copies().items() if name in folder.tensors}
    extras = tuple(
        t
        for name, t in folder.tensors.items()
        if name not in expected and name not in copies and family.is_extra(name, wmap.model)
    )
    names = set(folder.tensors) - {extra.name for extra in extras}
    ignored = tuple(sorted(name for name in names - set(expected) - set(copies) if ignore(name)))
    names -= set(ignored)
    missing = {name: tensor for name, tensor in expected.items() if name not in names} if partial else {}
    expected = {name: tensor for name, tensor in expected.items() if name not in missing}
    allowed = {**expected, **copies}
    faults = name_faults(
        names, allowed, {name: (folder.tensors[name].shape, allowed[name].shape) for name in names & set(allowed)}
    )
    if faults:
        raise UserError(f"{folder.path} does not hold this model: " + "; ".join(faults) + ".")
    fragments, second = (
        tuple(_stored_fragment(folder.tensors[name], tensor) for name, tensor in tensors.items())
        for tensors in (expected, copies)
    )
    _check_copies(folder, fragments, second)
    return HfStore(
        fragments=fragments,
        expert_layout=expert_layout if wmap.has_experts else None,
        extras=extras,
        copies=second,
        missing=missing,
        ignored=ignored,
    )


def spelled(wmap: WeightMap, family: Family, folder: HfFolder) -> WeightMap:
    """`wmap`, which has the family's own prefixes, in the spelling of a folder: each part's prefix as the folder's tensors have it."""
    prefixes = family.prefixes_of(folder.tensors, str(folder.path))
    return wmap if prefixes == family.prefixes else build(wmap.model, prefixes)


def _stored_fragment(stored: Stored, tensor: HfTensor) -> Fragment:
    return Fragment(
        label=f"{stored.file.name}: {stored.name}",
        dtype=stored.dtype,
        shape=tensor.view,
        placements=tensor.placements,
        file=stored.file,
        offset=stored.offset,
        transposed=tensor.transposed,
    )


def _check_copies(folder: HfFolder, fragments: Iterable[Fragment], copies: Iterable[Fragment]) -> None:
    """A tied model's head must be its embedding: same data type, same bytes."""
    by_place = {fragment.placements: fragment for fragment in fragments}
    for copy in copies:
        original = by_place.get(copy.placements)
        if original is None or original.dtype != copy.dtype or not _same_bytes(original, copy):
            what = f"differs from {original.label}" if original is not None else "is there without the embedding"
            raise UserError(
                f"{folder.path}: the model is tied (tie_word_embeddings), but {copy.label} {what}. If the head is a weight of its "
                f"own, set tie_word_embeddings to false in {CONFIG}; if not, remove it."
            )


def _expert_layout(folder: HfFolder, maps: Mapping[str, Mapping[str, HfTensor]]) -> str:
    """Which of Hugging Face's expert layouts a folder has, by the names that only one of them uses."""
    names = {layout: set(expected) for layout, expected in maps.items()}
    common = set.intersection(*names.values())
    found = {layout: sorted(set(folder.tensors) & (names[layout] - common)) for layout in EXPERT_LAYOUTS}
    held = [layout for layout in EXPERT_LAYOUTS if found[layout]]
    if len(held) > 1:
        shown = " and ".join(f"{layout} ({found[layout][0]})" for layout in held)
        raise UserError(
            f"{folder.path}: experts are there in two layouts, {shown}; which one counts is not known. Remove one."
        )
    return held[0] if held else EXPERT_LAYOUTS[0]


# --- checkpoints --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a checkpoint to be or to read: its folder, and the tensors it holds by global name."""

    folder: str
    expert: bool
    tensors: Mapping[str, LocalTensor]


def shards(wmap: WeightMap, layout: ParallelLayout, split: ModelSplit, *, repeated: bool = False) -> list[Shard]:
    """Every file of a checkpoint in this layout, in order of its name; expert files that would be empty are left out.

    `repeated` is the field's way with EP: a folder by (tp, pp, ep) with its experts and, again, the dense tensors.
    """
    found: list[Shard] = []
    for pp in range(layout.pp):
        if repeated:
            for tp in range(layout.tp):
                for ep in range(layout.ep):
                    local = wmap.local(shard_coords(tp=tp, pp=pp, etp=tp, ep=ep), layout, split)
                    folder = f"{mmfolder.dense_dir(layout, tp=tp, pp=pp)}_{ep:03d}"
                    found.append(Shard(folder=folder, expert=False, tensors=local))
            continue
        if layout.separate_experts:
            for etp in range(layout.etp):
                for ep in range(layout.ep):
                    local = wmap.local(shard_coords(pp=pp, etp=etp, ep=ep), layout, split, expert=True)
                    folder = mmfolder.expert_dir(layout, etp=etp, pp=pp, ep=ep)
                    found.append(Shard(folder=folder, expert=True, tensors=local))
        for tp in range(layout.tp):
            only = False if layout.separate_experts else None
            local = wmap.local(shard_coords(tp=tp, pp=pp, etp=tp), layout, split, expert=only)
            found.append(Shard(folder=mmfolder.dense_dir(layout, tp=tp, pp=pp), expert=False, tensors=local))
    return sorted((shard for shard in found if shard.tensors or not shard.expert), key=lambda shard: shard.folder)


def mm_store(checkpoint: Checkpoint, wmap: WeightMap, *, verify: bool = True) -> list[Fragment]:
    """Every tensor of a checkpoint as a fragment; refused unless its manifest lists exactly what its layout calls for.

    With `verify`, the engine compares what it reads with the manifest's CRCs. Replicas must have equal CRCs.
    """
    manifest, folder = checkpoint.manifest, checkpoint.folder
    entries = {(entry.file.rpartition("/")[0], entry.name): entry for entry in manifest.tensors}
    expected = {
        (shard.folder, name): local
        for shard in shards(wmap, manifest.layout, manifest.split, repeated=checkpoint.repeated)
        for name, local in shard.tensors.items()
    }
    shapes = {key: (entries[key].shape, expected[key].shape) for key in set(entries) & set(expected)}
    faults = name_faults(set(entries), expected, shapes, show=lambda key: f"{key[1]} in {key[0]}")
    if faults:
        raise UserError(
            f"{folder} does not hold this model in layout {manifest.layout.flags()}: " + "; ".join(faults) + "."
        )
    fragments = [
        Fragment(
            label=f"{entry.file}: {entry.name}",
            dtype=entry.dtype,
            shape=entry.shape,
            placements=expected[key].regions,
            file=folder / entry.file,
            offset=entry.offset,
            crc=entry.crc32 if verify else None,
        )
        for key, entry in entries.items()
    ]
    return fragments


def check_replicas(pairs: Iterable[tuple[Fragment, Fragment]]) -> None:
    """Copies of one tensor in several shards must be equal: by the manifest's CRCs, else by their bytes."""
    for kept, other in pairs:
        if kept.dtype != other.dtype:
            raise UserError(f"{kept.label} is {kept.dtype}, its copy {other.label} is {other.dtype}.")
        if kept.crc is None or other.crc is None or kept.stored != other.stored:
            equal = _same_bytes(kept, other)
        else:
            equal = kept.crc == other.crc
        if not equal:
            raise UserError(
                f"{kept.label} and {other.label} are copies of one tensor but differ. The checkpoint is not consistent."
            )


def _same_bytes(one: Fragment, two: Fragment, block: int = 4 << 20) -> bool:
    if one.nbytes != two.nbytes:
        return False
    with one.file.open("rb", buffering=0) as a, two.file.open("rb", buffering=0) as b:
        a.seek(one.data_start)
        b.seek(two.data_start)
        left = one.nbytes
        while left:
            part = a.read(min(block, left))
            if not part or part != b.read(len(part)):
                return False
            left -= len(part)
    return True


# --- optimizer state ----------------------------------------------------------------------------------------------


def moment_tensor(name: str, part: str) -> str:
    """The global tensor of one part of a parameter's optimizer state: it has the parameter's shape and splits alike."""
    return f"{name}@{part}"


def moment_placements(local: LocalTensor, part: str, stored: tuple[int, int]) -> tuple[Placement, ...]:
    """Where the elements `stored` of a local tensor's moment belong in the global moment."""
    found = []
    for box in flat_range(local.shape, *stored):
        for region in local.regions:
            if clipped := region.clip_local(box):
                found.append(
                    Placement(moment_tensor(region.tensor, part), clipped.start, clipped.local, clipped.extent)
                )
    return tuple(found)


def optimizer_store(checkpoint: Checkpoint, wmap: WeightMap, *, verify: bool = True) -> list[Fragment]:
    """Every moment of a checkpoint as a fragment of the global moment. A tied weight's second copy is stepped like the
    first, but may be cut elsewhere over its data-parallel ranks: the first copy's state is taken."""
    manifest, fragments, names = checkpoint.manifest, [], {moment.name for moment in checkpoint.manifest.optimizer}
    locals_ = {
        (shard.folder, name): local
        for shard in shards(wmap, manifest.layout, manifest.split, repeated=checkpoint.repeated)
        for name, local in shard.tensors.items()
    }
    for moment in manifest.optimizer:
        key = (moment.file.rpartition("/")[0], moment.name)
        label = f"{moment.file}: {moment.name}.{moment.part}"
        if key not in locals_ or locals_[key].shape != moment.shape or moment.part not in PARTS:
            expected = locals_[key].shape if key in locals_ else "no such tensor in this shard"
            raise UserError(
                f"{checkpoint.folder / moment.file}: optimizer state of {moment.name}.{moment.part} {moment.shape}, expected {expected}."
            )
        start, stop = moment.range
        if start == stop or locals_[key].tensor.canonical in names - {moment.name}:
            continue
        fragments.append(
            Fragment(
                label=label,
                dtype=moment.dtype,
                shape=moment.shape,
                placements=moment_placements(locals_[key], moment.part, moment.range),
                file=checkpoint.folder / moment.file,
                offset=moment.offset - start * (moment.nbytes // (stop - start)),
                stored=moment.range,
                crc=moment.crc32 if verify else None,
            )
        )
    return fragments


def moment_shapes(wmap: WeightMap) -> dict[str, Shape]:
    return {moment_tensor(tensor.name, part): tensor.shape for tensor in wmap.tensors.values() for part in PARTS}


# --- accounting ---------------------------------------------------------------------------------------------------


def name_faults(got: set, expected: Mapping, shapes: Mapping, *, show=str, most: int = 8) -> list[str]:
    """Missing, unexpected and wrongly shaped names, in words. `shapes` maps a common name to (got, expected)."""
    faults = []
    missing, unexpected = sorted(set(expected) - got), sorted(got - set(expected))
    if missing:
        faults.append(f"{len(missing)} missing: {_listed(missing, show, most)}")
    if unexpected:
        close = nearest(str(unexpected[0]), map(str, missing)) if missing and len(missing) < 200 else None
        faults.append(
            f"{len(unexpected)} unexpected: {_listed(unexpected, show, most)}"
            + (f" (did you mean {close}?)" if close else "")
        )
    wrong = [f"{show(name)} is {a}, expected {b}" for name, (a, b) in sorted(shapes.items()) if tuple(a) != tuple(b)]
    if wrong:
        faults.append(f"{len(wrong)} of another shape: {', '.join(wrong[:most])}{', ...' if len(wrong) > most else ''}")
    return faults


def _listed(names: list, show, most: int) -> str:
    return ", ".join(show(name) for name in names[:most]) + (", ..." if len(names) > most else "")
