"""A DCP checkpoint to be: its items at full size, the fragments to fill them, and the Hugging Face files beside it.

Like `output.MmOutput`: described first (so that a plan can be proven), then laid out under a temporary name, then finished:
CRCs, `.metadata`, manifest, rename, tracker. Items go into files of about 4 GB, as many ranks would have written them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_models.errors import UserError
from mm_models.weights import hfoutput, mmfolder
from mm_models.weights.boxes import Shape, volume
from mm_models.weights.dcp import writer
from mm_models.weights.dcp.chunks import box_fragments, item_boxes
from mm_models.weights.dcp.manifest import ItemRecord
from mm_models.weights.dtypes import itemsize
from mm_models.weights.model_map import WeightMap
from mm_models.weights.plan import Fragment
from mm_models.weights.ptwriter import Found

FILE_BYTES = 4 << 30
Described = tuple[str, str, Shape, Shape, Shape]
"""Key, data type, whole shape, offsets, sizes of an item."""


@dataclass(kw_only=True)
class DcpOutput:
    """`dtypes` maps a canonical global tensor to its data type; `beside` is the Hugging Face folder whose other files are copied,
    JSON as `change` edits it."""

    wmap: WeightMap
    expert_layout: str
    dcp_prefix: str
    dtypes: Mapping[str, str]
    beside: Path | None = None
    change: hfoutput.Change = hfoutput.keep
    source: Mapping[str, Any] = field(default_factory=dict)
    _items: list[Described] = field(default_factory=list, init=False)
    _made: list[tuple[Path, ItemRecord, Found]] = field(default_factory=list, init=False)

    def fragments(self) -> list[Fragment]:
        """The target fragments, one an item, without a place yet."""
        self._items, found = [], []
        for name, tensor in self.wmap.hf(self.expert_layout).items():
            key, dtype = writer.weight_key(name, self.dcp_prefix), self.dtypes[tensor.placements[0].tensor]
            for box in item_boxes(tensor, dtype):
                (fragment,) = box_fragments(tensor, box, label=key, dtype=dtype)
                found.append(fragment)
                self._items.append((key, dtype, tensor.shape, *box))
        return found

    def make_files(self, tmp: Path, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Every file at full size; the fragments with their places."""
        self._made = []
        for number, group in enumerate(self._files()):
            file = tmp / writer.rank_file(number)
            records, found = writer.skeleton(file, group)
            self._made += [(file, *both) for both in zip(records, found, strict=True)]
        return [
            replace(fragment, file=file, offset=record.offset)
            for fragment, (file, record, _) in zip(fragments, self._made, strict=True)
        ]

    def _files(self) -> list[list[Described]]:
        files, size = [[]], 0
        for item in self._items:
            nbytes = volume(item[4]) * itemsize(item[1])
            if files[-1] and size + nbytes > FILE_BYTES:
                files.append([])
                size = 0
            files[-1].append(item)
            size += nbytes
        return files

    def finish(self, tmp: Path, crcs: Mapping[int, int]) -> Path:
        """CRCs into the files, the description, the files beside, rename, tracker."""
        by_file: dict[Path, list[tuple[Found, int]]] = {}
        records = []
        for number, (file, record, found) in enumerate(self._made):
            by_file.setdefault(file, []).append((found, crcs[number]))
            records.append(replace(record, crc32=crcs[number]))
        for file, found in by_file.items():
            writer.seal(file, found)
        writer.finish(
            tmp,
            records,
            model=self.wmap.model,
            expert_layout=self.expert_layout,
            dcp_prefix=self.dcp_prefix,
            source=self.source,
        )
        if self.beside is not None:
            hfoutput.copy_files(self.beside, tmp.parent, self.change)
        return mmfolder.publish(tmp)


def refuse_foreign_output(out: Path) -> None:
    """Refuse to write into a folder that holds something else than a DCP checkpoint or what a killed run left of one."""
    if not out.exists() or not any(out.iterdir()):
        return
    ours = any(out.glob("*.tmp-*")) or any(out.glob("*/.metadata"))
    if not ours or any(out.glob("*.safetensors")) or any(out.glob("*/mp_rank_*")):
        raise UserError(f"{out}: exists already and is not a DCP checkpoint folder. Give another folder.")
