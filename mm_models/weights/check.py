"""Compares two folders of any kind, tensor by tensor and bit by bit: Hugging Face, DCP or Megatron, in any layout each.

Both are fragments of the same global tensors, so the comparison is a plan like any other, whose worker reads the target
instead of writing it. The CRCs of checkpoints are verified first. Memory stays bounded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mm_models.config.family import family_of
from mm_models.errors import UserError
from mm_models.weights import hffolder, stores
from mm_models.weights.boxes import Shape, whole
from mm_models.weights.dcp import folder as dcp_folder
from mm_models.weights.dcp.chunks import moment_of
from mm_models.weights.dcp.writer import optimizer_key, weight_key
from mm_models.weights.engine import Worker, execute
from mm_models.weights.manifest import open_checkpoint, verify
from mm_models.weights.model_map import WeightMap, build
from mm_models.weights.plan import Fragment, plan
from mm_models.weights.sources import dcp_names, kind_of


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`lines` say what was compared and what differs."""

    equal: bool
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Side:
    path: Path
    fragments: tuple[Fragment, ...]
    shapes: Mapping[str, Shape]
    names: frozenset[str]
    """Global tensors it holds."""
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def moments(self) -> bool:
        """Whether there is optimizer state."""
        return any("@" in name for name in self.names)

    def without_moments(self) -> _Side:
        names = frozenset(name for name in self.names if "@" not in name)
        return replace(self, names=names, fragments=tuple(f for f in self.fragments if f.placements[0].tensor in names))


class _Comparer(Worker):
    """Counts the bytes in which the target's file differs from what would be written."""

    target_flags = os.O_RDONLY

    def __init__(self, *args):
        super().__init__(*args)
        self.differing: dict[int, int] = {}
        self._there = bytearray()

    def _deliver(self, number: int, offset: int, data: memoryview, crc: int | None) -> None:
        target = self.plan.targets[number]
        if len(self._there) < len(data):
            self._there = bytearray(len(data))
        view = memoryview(self._there)[: len(data)]
        if os.preadv(self.files.targets[number], [view], target.offset + offset) != len(data):
            raise UserError(f"{target.label}: {target.file} is cut short.")
        wrong = int(np.count_nonzero(np.frombuffer(data, np.uint8) != np.frombuffer(view, np.uint8)))
        if wrong:
            self.differing[number] = self.differing.get(number, 0) + wrong


def compare(a: Path, b: Path, *, jobs: int | None = None) -> Comparison:
    """Compare the tensors of `a` and `b`."""
    lines: list[str] = []
    if (raw := _same_names(a, b)) is not None:
        one, two = raw
    else:
        one, two = _open(a), _open(b)
    if one.moments != two.moments:
        bare = one if two.moments else two
        one, two = one.without_moments(), two.without_moments()
        lines.append(f"{bare.path}: holds no optimizer state; weights are compared alone")
    lines += [f"{side.path}: {note}" for side in (one, two) for note in side.notes]
    faults = [f"{side.path}: {fault}" for side in (one, two) for fault in side.faults]
    for here, there in ((one, two), (two, one)):
        if only := sorted(here.names - there.names):
            faults.append(f"only in {here.path}: {', '.join(only[:8])}{', ...' if len(only) > 8 else ''} ({len(only)})")
    common = one.names & two.names
    faults += [
        f"{n}: shape {one.shapes[n]} in {one.path}, {two.shapes[n]} in {two.path}"
        for n in sorted(common)
        if one.shapes[n] != two.shapes[n]
    ]
    common = {name for name in common if one.shapes[name] == two.shapes[name]}
    dtypes = [{p.tensor: f.dtype for f in side.fragments for p in f.placements} for side in (one, two)]
    faults += [
        f"{n}: {dtypes[0][n]} in {one.path}, {dtypes[1][n]} in {two.path}"
        for n in sorted(common)
        if dtypes[0][n] != dtypes[1][n]
    ]
    common = {name for name in common if dtypes[0][name] == dtypes[1][name]}
    if common:
        faults += _differences(one, two, common, jobs)
    lines += [f"DIFFERS  {fault}" for fault in faults]
    lines.append(f"{len(common)} tensors compared, " + ("all equal" if not faults else f"{len(faults)} differences"))
    return Comparison(equal=not faults, lines=tuple(lines))


def _differences(one: _Side, two: _Side, common: set[str], jobs: int | None) -> list[str]:
    def of(side: _Side) -> list[Fragment]:
        return [replace(f, crc=None) for f in side.fragments if all(p.tensor in common for p in f.placements)]

    planned = plan(of(one), of(two), one.shapes, use_all=False)
    faults = []
    try:
        stores.check_replicas(planned.replicas)
    except UserError as error:
        faults.append(str(error))
    differing: dict[int, int] = {}
    for worker in execute(planned, jobs=jobs, crc=False, worker=_Comparer).workers:
        for number, count in worker.differing.items():
            differing[number] = differing.get(number, 0) + count
    return faults + [
        f"{planned.targets[n].label}: {count} of {planned.targets[n].nbytes} bytes"
        for n, count in sorted(differing.items())
    ]


def _same_names(a: Path, b: Path) -> tuple[_Side, _Side] | None:
    """Two Hugging Face folders with the same tensor names need no map: extras and unknown families are compared too."""
    if not kind_of(a) == kind_of(b) == "hf":
        return None
    folders = [hffolder.open_folder(path) for path in (a, b)]
    if set(folders[0].tensors) != set(folders[1].tensors):
        return None
    return tuple(
        _Side(
            path=folder.path,
            fragments=tuple(
                Fragment(
                    label=f"{t.file.name}: {name}",
                    dtype=t.dtype,
                    shape=t.shape or (1,),
                    placements=(whole(name, t.shape or (1,)),),
                    file=t.file,
                    offset=t.offset,
                )
                for name, t in folder.tensors.items()
            ),
            shapes={name: t.shape or (1,) for name, t in folder.tensors.items()},
            names=frozenset(folder.tensors),
        )
        for folder in folders
    )


def _open(path: Path) -> _Side:
    if dcp_folder.is_dcp(path):
        wmap, fragments, faults = _open_dcp(path)
        notes: tuple[str, ...] = ()
    elif hffolder.is_hf_folder(path):
        folder = hffolder.open_folder(path)
        family = family_of(folder.config, str(path / hffolder.CONFIG))
        wmap = build(family.model(folder.config, str(path / hffolder.CONFIG)), family.prefixes)
        store = stores.hf_store(folder, wmap, family)
        notes = (
            (f"not compared, known extras: {', '.join(extra.name for extra in store.extras)}",) if store.extras else ()
        )
        fragments, faults = store.fragments, ()
    else:
        checkpoint = open_checkpoint(path)
        wmap = build(checkpoint.manifest.model)
        fragments = (*stores.mm_store(checkpoint, wmap), *stores.optimizer_store(checkpoint, wmap))
        notes, faults = (), tuple(verify(checkpoint))
    shapes = {tensor.name: tensor.shape for tensor in wmap.tensors.values()} | stores.moment_shapes(wmap)
    names = frozenset(placement.tensor for fragment in fragments for placement in fragment.placements)
    return _Side(path=path, fragments=tuple(fragments), shapes=shapes, names=names, notes=notes, faults=faults)


def _open_dcp(path: Path) -> tuple[WeightMap, tuple[Fragment, ...], tuple[str, ...]]:
    folder = dcp_folder.open_dcp(path)
    family, model = dcp_folder.model_of(folder)
    wmap = build(model, family.prefixes)
    prefix = folder.manifest.dcp_prefix if folder.manifest else ""
    names = dcp_names(folder, wmap, family, declared_layout=None, dcp_prefix=prefix)
    fragments = dcp_folder.fragments(folder, names.expected, lambda name: weight_key(name, prefix))
    for part in dcp_folder.present_moments(folder):
        tensors = {
            name: moment_of(names.expected[name], part) for name in folder.moments[part] if name in names.expected
        }
        fragments += dcp_folder.fragments(folder, tensors, lambda name, part=part: optimizer_key(name, part))
    return wmap, tuple(fragments), tuple(dcp_folder.damaged(folder))
