"""`moe_expert`: a Hugging Face folder with its experts in another layout, as new safetensors files.

`stacked` and `flat` have other bytes than Hugging Face's own layouts under its names: such a folder says so in every file's
metadata and in a marker file, and is refused wherever Hugging Face's orientation is expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_models.config.family import family_of
from mm_models.errors import UserError
from mm_models.weights import hffolder, hfoutput, mmfolder, stores
from mm_models.weights.boxes import Shape, volume, whole
from mm_models.weights.conversion import (
    Options,
    Report,
    check_converter,
    dtypes,
    proven,
    refuse_foreign_output,
    refuse_same,
    report,
    run,
    temporary,
)
from mm_models.weights.dcp.layouts import check_known
from mm_models.weights.dtypes import itemsize
from mm_models.weights.hffolder import Stored
from mm_models.weights.manifest import versions
from mm_models.weights.model_map import WeightMap, build
from mm_models.weights.output import need_space, write_atomically
from mm_models.weights.plan import Fragment
from mm_models.weights.rules import TRANSPOSED_LAYOUTS

FILE_BYTES = 5_000_000_000


def moe_expert(
    hf: str | Path,
    out: str | Path,
    *,
    expert_layout: str,
    hf_prefix: str = "",
    converter: str | None = None,
    options: Options,
) -> Report:
    """Write the folder `hf`, in whichever layout it is, to `out` with its experts in `expert_layout`; all else unchanged."""
    folder, out = hffolder.open_folder(hf, hf_prefix), Path(out)
    where = str(folder.path / hffolder.CONFIG)
    family = family_of(folder.config, where)
    check_converter(converter, family, folder.path)
    wmap = stores.spelled(build(family.model(folder.config, where), family.prefixes), family, folder)
    if not wmap.has_experts:
        raise UserError(f"{folder.path}: {family.model_id} has no experts to merge or split.")
    store = stores.hf_store(folder, wmap, family, merged=True)
    extras = [hfoutput.HfOutput.extra_fragment(extra) for extra in store.extras]
    output = ExpertsOutput(
        wmap=wmap,
        expert_layout=check_known(expert_layout),
        dtypes=dtypes(store.fragments),
        extras=store.extras,
        prefix=hf_prefix,
    )
    fragments = output.fragments()
    more = {p.tensor: f.shape for f in extras for p in f.placements}
    planned = proven([*store.fragments, *extras], fragments, wmap, more)
    refuse_same(folder.path, out)
    refuse_foreign_output(out, options.overwrite)
    need_space(out, planned.bytes_written)
    mmfolder.remove_stale(out.parent, out.name)
    with temporary(mmfolder.reserve(out)) as tmp:
        located = output.make_files(tmp, fragments)
        result, seconds = run(replace(planned, targets=located), options, crc=False)
        hfoutput.copy_files(folder.path, tmp)
        output.finish(tmp)
        mmfolder.finish(tmp)
    return report(out, fragments, result, seconds)


@dataclass(kw_only=True)
class ExpertsOutput:
    """A folder to be, its tensors in the order of the weight map, extras last."""

    wmap: WeightMap
    expert_layout: str
    dtypes: Mapping[str, str]
    extras: Sequence[Stored]
    prefix: str
    _files: dict[str, list[tuple[str, str, Shape]]] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    @property
    def metadata(self) -> dict[str, str]:
        return {"format": "pt"} | ({"expert_layout": self.expert_layout} if self._marked else {})

    @property
    def _marked(self) -> bool:
        return self.expert_layout in TRANSPOSED_LAYOUTS

    def fragments(self) -> list[Fragment]:
        """The target fragments, without a place yet."""
        found, tensors = [], []
        for name, tensor in self.wmap.hf(self.expert_layout).items():
            dtype = self.dtypes[tensor.placements[0].tensor]
            found.append(
                Fragment(
                    label=name,
                    dtype=dtype,
                    shape=tensor.view,
                    placements=tensor.placements,
                    transposed=tensor.transposed,
                )
            )
            tensors.append((self.prefix + name, dtype, tensor.shape))
        for extra in self.extras:
            shape = extra.shape or (1,)
            found.append(
                Fragment(
                    label=extra.name, dtype=extra.dtype, shape=shape, placements=(whole(f"extra:{extra.name}", shape),)
                )
            )
            tensors.append((self.prefix + extra.name, extra.dtype, extra.shape))
        self._names = [name for name, *_ in tensors]
        self._files = _in_files(tensors)
        return found

    def make_files(self, tmp: Path, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Every safetensors file at full size; the fragments with their places."""
        places = {}
        for name, tensors in self._files.items():
            for stored in hffolder.skeleton(tmp / name, hffolder.make_header(tensors, self.metadata)):
                places[stored.name] = stored
        return [
            replace(fragment, file=places[name].file, offset=places[name].offset)
            for fragment, name in zip(fragments, self._names, strict=True)
        ]

    def finish(self, tmp: Path) -> None:
        """The index, and what says that the folder is ours and how its experts lie."""
        if len(self._files) > 1:
            sizes = sum(volume(shape) * itemsize(dtype) for ts in self._files.values() for _, dtype, shape in ts)
            weight_map = {name: file for file, tensors in self._files.items() for name, *_ in tensors}
            index: dict[str, Any] = {"metadata": {"total_size": sizes}, "weight_map": weight_map}
            write_atomically(tmp / hffolder.INDEX, json.dumps(index, indent=2) + "\n")
        said = {"format": "mm-models moe_expert", "versions": versions(), "expert_layout": self.expert_layout}
        write_atomically(tmp / hfoutput.MARK, json.dumps(said, indent=2) + "\n")
        if self._marked:
            mark = {"expert_layout": self.expert_layout}
            write_atomically(tmp / hffolder.EXPERTS_MARK, json.dumps(mark, indent=2) + "\n")


def _in_files(tensors: Sequence[tuple[str, str, Shape]]) -> dict[str, list[tuple[str, str, Shape]]]:
    groups, size = [[]], 0
    for tensor in tensors:
        nbytes = volume(tensor[2]) * itemsize(tensor[1])
        if groups[-1] and size + nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
    if len(groups) == 1:
        return {hffolder.SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
