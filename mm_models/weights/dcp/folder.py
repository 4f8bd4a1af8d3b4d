"""DCP folders: finding the right one, what it holds, and its tensors as fragments.

    <dir>/latest_checkpointed_iteration.txt      "release" or the number
    <dir>/release/ or <dir>/iter_0000100/        .metadata, __{rank}_0.distcp, and manifest.json when it is ours

A folder of the field has no manifest: its expert layout must be declared, and its items are located by reading the table of
each. Keys are `model.` + `dcp_prefix` + Hugging Face name for weights, `optimizer.state.<name>.<part>` for the optimizer.
Refused by name: a folder that is not complete, files cut short, a found prefix or expert layout that is not the declared one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_models.config.family import Family, family_of, family_of_model
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.split import without_split
from mm_models.config.strict import load_json
from mm_models.errors import UserError, nearest
from mm_models.weights import hffolder, mmfolder, ptfile
from mm_models.weights.boxes import Box, partition_fault
from mm_models.weights.dcp import chunks, layouts, manifest, metadata
from mm_models.weights.dcp.manifest import DcpManifest, ItemRecord
from mm_models.weights.dcp.writer import MOMENTS, OPTIMIZER, WEIGHTS
from mm_models.weights.manifest import file_crc
from mm_models.weights.model_map import HfTensor
from mm_models.weights.plan import Fragment

Wanted = Callable[[str, Box], bool]
"""Whether a box of a Hugging Face tensor is needed."""


@dataclass(frozen=True, kw_only=True)
class DcpFolder:
    """A complete folder. `manifest` is None for one of the field."""

    path: Path
    metadata: metadata.Metadata
    manifest: DcpManifest | None

    @property
    def iteration(self) -> int | None:
        """The number in the folder's name; None for a release or another name."""
        if self.manifest is not None:
            return self.manifest.iteration
        number = self.path.name.removeprefix("iter_")
        return int(number) if number.isdecimal() else None

    @property
    def weights(self) -> dict[str, metadata.TensorMeta]:
        """Tensors whose key begins with `model.`, by the rest of the key."""
        return _under(self.metadata.tensors, WEIGHTS)

    @property
    def moments(self) -> dict[str, dict[str, metadata.TensorMeta]]:
        """Part (`exp_avg`, ...) -> Hugging Face name -> tensor."""
        found: dict[str, dict[str, metadata.TensorMeta]] = {}
        for name, tensor in _under(self.metadata.tensors, OPTIMIZER).items():
            name, _, part = name.rpartition(".")
            found.setdefault(part, {})[name] = tensor
        return found


def _under(tensors: Mapping[str, metadata.TensorMeta], prefix: str) -> dict[str, metadata.TensorMeta]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


# --- finding ------------------------------------------------------------------------------------------------------


def is_dcp(path: str | Path) -> bool:
    """Whether `path` is a DCP folder, or the folder above some."""
    path = Path(path)
    return (path / metadata.METADATA).is_file() or any(path.glob(f"*/{metadata.METADATA}"))


def iterations(path: Path) -> list[str]:
    """Names of the complete checkpoints in `path`."""
    return sorted(file.parent.name for file in path.glob(f"*/{metadata.METADATA}") if ".tmp-" not in file.parent.name)


def resolve(path: str | Path, iteration: int | str | None = None) -> Path:
    """The folder of one complete checkpoint: `path` itself, the tracker's, or `iteration`. Refused: anything else."""
    path = Path(path)
    if not path.exists():
        siblings = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        raise UserError(f"{path}: no such folder." + (f" Did you mean {path.parent / close}?" if close else ""))
    if (path / metadata.METADATA).is_file() and iteration is None:
        return path
    if iteration is None:
        iteration, said = _tracked(path), f"{mmfolder.TRACKER} names it"
    else:
        said = "it was asked for"
    name = mmfolder.RELEASE if iteration == mmfolder.RELEASE else mmfolder.iteration_name(int(iteration))
    folder, complete = path / name, ", ".join(iterations(path)) or "none"
    if not folder.is_dir():
        raise UserError(f"{path}: {name} is not there, but {said}. Complete checkpoints here: {complete}.")
    if not (folder / metadata.METADATA).is_file():
        if any(folder.glob("mp_rank_*")):
            raise UserError(
                f"{folder}: a checkpoint of the Megatron target, not DCP. mm-convert mm_to_hf and mm_to_dcp read it."
            )
        raise UserError(
            f"{folder}: no {metadata.METADATA}, so it is not a complete DCP checkpoint. Complete checkpoints here: {complete}."
        )
    return folder


def _tracked(path: Path) -> str:
    file = path / mmfolder.TRACKER
    if not path.is_dir() or not file.is_file():
        found = sorted(child.name for child in path.iterdir()) if path.is_dir() else []
        shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "nothing"
        complete = iterations(path) if path.is_dir() else []
        inside = [name for name in found if (path / name / mmfolder.TRACKER).is_file()]
        hint = (
            f" Did you mean {' or '.join(str(path / name) for name in (complete or inside)[:3])}?"
            if complete or inside
            else ""
        )
        raise UserError(
            f"{path}: neither {metadata.METADATA} nor {mmfolder.TRACKER} there (found: {shown}), so it is not a DCP checkpoint.{hint}"
        )
    text = file.read_text().strip()
    if text != mmfolder.RELEASE and not text.isdecimal():
        raise UserError(f"{file}: says {text!r}, expected '{mmfolder.RELEASE}' or an iteration number.")
    return text


def open_dcp(path: str | Path, iteration: int | str | None = None) -> DcpFolder:
    """The checkpoint that `resolve` finds: every tensor whole, every file present and long enough."""
    folder = resolve(path, iteration)
    content = metadata.read(folder / metadata.METADATA)
    said = None
    if (folder / mmfolder.MANIFEST).is_file():
        said = manifest.read(folder / mmfolder.MANIFEST)
        _check_agreement(folder, content, said)
    needed: dict[str, int] = {}
    for key, tensor in content.tensors.items():
        if fault := partition_fault(tensor.shape, [(item.offsets, item.sizes) for item in tensor.items]):
            raise UserError(f"{folder}: {key}: {fault}. The checkpoint does not hold the whole tensor.")
        for item in tensor.items:
            needed[item.place.file] = max(needed.get(item.place.file, 0), item.place.offset + item.place.length)
    for name, end in needed.items():
        file = folder / name
        if Path(name).name != name:
            raise UserError(f"{folder / metadata.METADATA}: names {name!r}, which is not a file of this folder.")
        if not file.is_file():
            raise UserError(
                f"{file}: missing, {metadata.METADATA} names it. Restore the file or use another iteration."
            )
        if (size := file.stat().st_size) < end:
            raise UserError(
                f"{file}: has {size} bytes, {end} are needed: cut short. Restore it or use another iteration."
            )
    return DcpFolder(path=folder, metadata=content, manifest=said)


def _check_agreement(folder: Path, content: metadata.Metadata, said: DcpManifest) -> None:
    """Manifest and metadata were written together; one that was exchanged is refused."""
    there = {(key, item.offsets, item.sizes) for key, tensor in content.tensors.items() for item in tensor.items}
    if there != {(item.key, item.offsets, item.sizes) for item in said.items}:
        raise UserError(
            f"{folder}: {mmfolder.MANIFEST} and {metadata.METADATA} do not list the same items. Restore the folder."
        )


# --- prefix and layout --------------------------------------------------------------------------------------------


def check_prefix(folder: DcpFolder, names: Mapping[str, object], dcp_prefix: str) -> None:
    """Refuse keys whose prefix is not `model.` + `dcp_prefix`, naming the one they have; `names` are Hugging Face names."""
    found: dict[str, int] = {}
    for key in folder.metadata.tensors:
        if key.startswith(OPTIMIZER):
            continue
        tails = [name for at in _starts(key) if (name := key[at:]) in names]
        if tails:
            prefix = key[: -len(tails[0])]
            found[prefix] = found.get(prefix, 0) + 1
    expected = WEIGHTS + dcp_prefix
    if not found or expected in found:
        return
    most = max(found, key=found.get)
    mend = (
        layouts.reconvert(folder.path, dcp_prefix=most.removeprefix(WEIGHTS))
        if most.startswith(WEIGHTS)
        else "Save it again with torch.distributed.checkpoint.save({'model': state_dict}, ...), the names in it being Hugging Face's."
    )
    shown = next(key for key in folder.metadata.tensors if key.startswith(most))
    raise UserError(
        f"{folder.path}: its keys begin with {most!r} ({shown}), expected {expected!r} (model. + --dcp_prefix {dcp_prefix!r}). {mend}"
    )


def _starts(key: str) -> Iterator[int]:
    """Where a name may begin: at 0 and behind every dot."""
    yield 0
    for at, letter in enumerate(key):
        if letter == ".":
            yield at + 1


# --- fragments ----------------------------------------------------------------------------------------------------


def fragments(
    folder: DcpFolder,
    expected: Mapping[str, HfTensor],
    key_of: Callable[[str], str],
    *,
    wanted: Wanted | None = None,
    verify: bool = True,
) -> list[Fragment]:
    """The tensors `expected` (by Hugging Face name) as fragments; `key_of` gives the key of a name.

    All of them must be there with their shapes: that is the caller's accounting. With `wanted`, only the items it asks for.
    """
    told = {(item.key, item.offsets): item for item in folder.manifest.items} if folder.manifest else {}
    opened: dict[str, io.BufferedReader] = {}
    found: list[Fragment] = []
    try:
        for name, tensor in expected.items():
            key = key_of(name)
            meta = folder.metadata.tensors[key]
            for item in meta.items:
                box = (item.offsets, item.sizes)
                if wanted is not None and not wanted(name, box):
                    continue
                offset, crc = _located(folder, key, meta, item, told.get((key, item.offsets)), opened)
                found += chunks.box_fragments(
                    tensor,
                    box,
                    label=f"{item.place.file}: {key}",
                    dtype=meta.dtype,
                    file=folder.path / item.place.file,
                    offset=offset,
                    crc=crc if verify else None,
                )
    finally:
        for file in opened.values():
            file.close()
    return found


def _located(
    folder: DcpFolder,
    key: str,
    meta: metadata.TensorMeta,
    item: metadata.TensorItem,
    told: ItemRecord | None,
    opened: dict[str, io.BufferedReader],
) -> tuple[int, int | None]:
    """(offset of an item's elements in its file, their CRC if it is known)."""
    place = item.place
    if told is not None:
        return told.offset, told.crc32
    if place.file not in opened:
        opened[place.file] = (folder.path / place.file).open("rb", buffering=0)
    content, found = ptfile.scan_open(
        _Window(opened[place.file], place.offset, place.length), Path(f"{folder.path / place.file}: {key}")
    )
    if () not in found or (found[()].dtype, found[()].shape) != (meta.dtype, item.sizes):
        raise UserError(
            f"{folder.path / place.file}: {key} at {item.offsets} is {content!r}, expected {meta.dtype} {item.sizes}."
        )
    return place.offset + found[()].offset, None


class _Window(io.RawIOBase):
    """Bytes [start, start+length) of an open file, as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        super().__init__()
        self._fd, self._start, self._length, self._at = file.fileno(), start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(22, "a negative position")
        self._at = base + offset
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        got = os.preadv(self._fd, [view], self._start + self._at) if len(view) else 0
        self._at += got
        return got


def present_moments(folder: DcpFolder) -> tuple[str, ...]:
    """Which moments the folder holds."""
    return tuple(part for part in MOMENTS if part in folder.moments)


def damaged(folder: DcpFolder) -> list[str]:
    """Read every item whose CRC the manifest states and compare; the faults, by name."""
    faults = []
    for item in folder.manifest.items if folder.manifest else ():
        if item.crc32 is None:
            continue
        found = file_crc(folder.path / item.file, item.offset, item.nbytes)
        if found != item.crc32:
            faults.append(
                f"{item.file}: {item.key} at {item.offsets}: CRC-32 is {found:08x}, the manifest says {item.crc32:08x}"
            )
    return faults


def model_of(folder: DcpFolder, model_json: str | Path | None = None) -> tuple[Family, ModelConfig]:
    """(family, model) of a DCP folder: its manifest's, else `model_json`'s, else that of the config.json in or above it."""
    if folder.manifest is not None:
        return family_of_model(folder.manifest.model), folder.manifest.model
    if model_json is not None:
        model = without_split(load_model_config(model_json))
        return family_of_model(model), model
    for path in (folder.path, folder.path.parent):
        if (config := path / hffolder.CONFIG).is_file():
            content = load_json(config)
            family = family_of(content, str(config))
            return family, family.model(content, str(config))
    raise UserError(
        f"{folder.path}: has no manifest and no {hffolder.CONFIG} in it or above it, so the model is not known. Give --model model.json."
    )
