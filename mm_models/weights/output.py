"""A checkpoint to be: its files at full size, and the fragments to fill them.

`MmOutput` first describes the target (its fragments have no file yet, so that a plan can be proven), then makes the files
under a temporary name, then finishes: CRCs, manifest, `model.json`, tracker.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_models.config.split import with_split
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.weights import mmfolder, ptfile
from mm_models.weights.boxes import volume
from mm_models.weights.manifest import Entry, Manifest, Moment, write_manifest
from mm_models.weights.model_map import WeightMap
from mm_models.weights.plan import Fragment
from mm_models.weights.stores import PARTS, Shard, moment_placements, shards

CHECKPOINT_VERSION = 3.0


def need_space(folder: Path, nbytes: int) -> None:
    """Refuse to start what the disk cannot hold."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise UserError(f"{folder}: {nbytes / 1e9:.2f} GB are to be written, {free / 1e9:.2f} GB are free there.")


# --- checkpoints --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimizerHead:
    """What an optimizer state holds beside its moments: `names` are the parameters that have any."""

    names: frozenset[str]
    step: int
    groups: Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class MmOutput:
    """A checkpoint to be. `dtypes` maps a canonical global tensor to its data type; `extra` goes into every dense file."""

    wmap: WeightMap
    layout: ParallelLayout
    split: ModelSplit
    dtypes: Mapping[str, str]
    iteration: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerHead | None = None
    _keys: list[tuple] = field(default_factory=list, init=False)
    _shards: list[Shard] = field(default_factory=list, init=False)
    _places: list[tuple[Path, ptfile.Found]] = field(default_factory=list, init=False)

    def fragments(self) -> list[Fragment]:
        """The target fragments of weights and moments, without a place yet."""
        self._keys, self._shards = [], shards(self.wmap, self.layout, self.split)
        found = []
        for shard in self._shards:
            for name, local in shard.tensors.items():
                label, dtype = f"{shard.folder}: {name}", self.dtypes[local.tensor.canonical]
                found.append(Fragment(label=label, dtype=dtype, shape=local.shape, placements=local.regions))
                self._keys.append((shard, name, None))
            for name in self._moments(shard):
                local, whole = shard.tensors[name], (0, volume(shard.tensors[name].shape))
                for part in PARTS:
                    placements = moment_placements(local, part, whole)
                    label = f"{shard.folder}: {name}.{part}"
                    found.append(Fragment(label=label, dtype="F32", shape=local.shape, placements=placements))
                    self._keys.append((shard, name, part))
        return found

    def _moments(self, shard: Shard) -> list[str]:
        if self.optimizer is None:
            return []
        return [name for name, local in shard.tensors.items() if local.tensor.canonical in self.optimizer.names]

    def make_files(self, tmp: Path, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Every file of the checkpoint at full size; the fragments with their places."""
        places: dict[tuple, tuple[Path, ptfile.Found]] = {}
        for shard in self._shards:
            (tmp / shard.folder).mkdir()
            places |= self._make_model_file(tmp, shard)
            if self._moments(shard):
                places |= self._make_optimizer_file(tmp, shard)
        self._places = [places[shard.folder, name, part] for shard, name, part in self._keys]
        return [
            replace(fragment, file=file, offset=found.offset)
            for fragment, (file, found) in zip(fragments, self._places, strict=True)
        ]

    def _make_model_file(self, tmp: Path, shard: Shard) -> dict[tuple, tuple[Path, ptfile.Found]]:
        content: dict[str, Any] = {mmfolder.container(self.layout, chunk): {} for chunk in range(self.layout.vpp)}
        keys = {}
        for name, local in shard.tensors.items():
            key = (mmfolder.container(self.layout, local.chunk), mmfolder.local_key(name, self.split))
            keys[key] = name
            content[key[0]][key[1]] = ptfile.Spec(dtype=self.dtypes[local.tensor.canonical], shape=local.shape)
        content |= {"checkpoint_version": CHECKPOINT_VERSION, "iteration": self.iteration or 0}
        if not shard.expert:
            content |= self.extra
        file = tmp / shard.folder / mmfolder.MODEL_FILE
        found = ptfile.skeleton(file, content)
        return {(shard.folder, name, None): (file, found[key]) for key, name in keys.items()}

    def _make_optimizer_file(self, tmp: Path, shard: Shard) -> dict[tuple, tuple[Path, ptfile.Found]]:
        names, params = self._moments(shard), {}
        for name in names:
            shape = shard.tensors[name].shape
            spec = ptfile.Spec(dtype="F32", shape=(volume(shape),))
            params[name] = {"range": (0, volume(shape)), "shape": shape} | dict.fromkeys(PARTS, spec)
        groups = [dict(group) | {"params": self._members(shard, names, group)} for group in self.optimizer.groups]
        content = {
            "params": params,
            "step": self.optimizer.step,
            "groups": [group for group in groups if group["params"]],
        }
        file = tmp / shard.folder / mmfolder.optimizer_file(0)
        found = ptfile.skeleton(file, content)
        return {(shard.folder, name, part): (file, found["params", name, part]) for name in names for part in PARTS}

    @staticmethod
    def _members(shard: Shard, names: Sequence[str], group: Mapping[str, Any]) -> list[str]:
        """The shard's parameters in a group; a second copy of a tied weight goes with the first."""
        return sorted(
            name for name in names if name in group["params"] or shard.tensors[name].tensor.canonical in group["params"]
        )

    def manifest(self, tmp: Path, fragments: Sequence[Fragment], crcs: Mapping[int, int]) -> Manifest:
        entries, moments = [], []
        for number, (fragment, (shard, name, part)) in enumerate(zip(fragments, self._keys, strict=True)):
            common = {
                "name": name,
                "file": str(fragment.file.relative_to(tmp)),
                "dtype": fragment.dtype,
                "shape": fragment.shape,
                "offset": fragment.offset,
                "crc32": crcs[number],
            }
            if part is None:
                chunk = shard.tensors[name].chunk
                entries.append(
                    Entry(
                        container=mmfolder.container(self.layout, chunk),
                        key=mmfolder.local_key(name, self.split),
                        **common,
                    )
                )
            else:
                moments.append(Moment(part=part, range=(0, volume(fragment.shape)), **common))
        return Manifest(
            iteration=self.iteration,
            model=with_split(self.wmap.model, self.split),
            layout=self.layout,
            split=self.split,
            tensors=tuple(entries),
            optimizer=tuple(moments),
            source=self.source,
        )

    def finish(self, tmp: Path, fragments: Sequence[Fragment], crcs: Mapping[int, int]) -> Path:
        """CRCs into the zip files, manifest, `model.json` beside the checkpoint, rename, tracker."""
        manifest = self.manifest(tmp, fragments, crcs)
        by_file: dict[Path, list[tuple[ptfile.Found, int]]] = {}
        for number, (file, found) in enumerate(self._places):
            by_file.setdefault(file, []).append((found, crcs[number]))
        for file, found in by_file.items():
            ptfile.seal(file, found)
        for shard in self._shards:
            mmfolder.sync_folder(tmp / shard.folder)
        write_manifest(tmp, manifest)
        content = manifest.model.model_dump(mode="json", exclude_none=True)
        write_atomically(tmp.parent / "model.json", json.dumps(content, indent=2) + "\n")
        return mmfolder.publish(tmp)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file durably, whole or not at all."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    with tmp.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)
