"""Checkpoint folders of the field: Megatron-style rank folders that no manifest describes.

    <dir>/latest_checkpointed_iteration.txt, <dir>/{release,iter_0000100}/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Which number is which (TP, PP, EP) follows from the layout the user gives; with EP the field repeats the dense tensors in
every expert rank's folder, and the copies must be equal. Weights only: optimizer files of the field are not read. Keys that
end in `_extra_state` hold no weights and are passed over.
"""

from __future__ import annotations

from pathlib import Path

from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import mmfolder, ptfile
from mm_models.weights.manifest import Checkpoint, Entry, Manifest
from mm_models.weights.model_map import build
from mm_models.weights.stores import shards


def is_foreign(path: str | Path, iteration: str | int | None = None) -> bool:
    """Whether `path` leads to rank folders without a manifest."""
    folder = _folder(Path(path), iteration)
    return folder is not None and not (folder / mmfolder.MANIFEST).exists() and any(folder.glob("mp_rank_*/*.pt"))


def _folder(path: Path, iteration: str | int | None) -> Path | None:
    if iteration is None and (path / mmfolder.TRACKER).is_file():
        iteration = (path / mmfolder.TRACKER).read_text().strip()
    if iteration is None:
        return path if path.is_dir() else None
    if str(iteration) != mmfolder.RELEASE and not str(iteration).isdecimal():
        return None
    name = mmfolder.RELEASE if str(iteration) == mmfolder.RELEASE else mmfolder.iteration_name(int(iteration))
    return path / name if (path / name).is_dir() else None


def open_foreign(
    path: str | Path,
    model: ModelConfig,
    layout: ParallelLayout,
    vision_layers: object,
    text_layers: object,
    iteration: str | int | None = None,
) -> Checkpoint:
    """The folder as a checkpoint with a manifest made from its files' own tables; CRCs are unknown."""
    folder = _folder(Path(path), iteration)
    model.check_layout(layout)
    split = model.split(layout, vision_layers=vision_layers, text_layers=text_layers)
    repeated = layout.ep > 1 and not any(folder.glob("expert_rank_*"))
    if repeated and layout.etp != layout.tp:
        raise UserError(f"{folder}: no folder by (tp, pp, ep) can hold etp {layout.etp} with tp {layout.tp}.")
    wanted = shards(build(model), layout, split, repeated=repeated)
    present = {child.name for child in folder.iterdir() if child.is_dir() and "_rank_" in child.name}
    if present != {shard.folder for shard in wanted}:
        expected = ", ".join(shard.folder for shard in wanted)
        raise UserError(
            f"{folder}: holds {', '.join(sorted(present))}; layout {layout.flags()} has {expected}. Correct the layout options."
        )
    entries = [entry for shard in wanted for entry in _entries(folder, shard.folder, layout, split)]
    name = folder.name
    manifest = Manifest(
        iteration=int(name.removeprefix("iter_")) if name.startswith("iter_") else None,
        model=model,
        layout=layout,
        split=split,
        tensors=tuple(entries),
        source={"kind": "foreign"},
    )
    return Checkpoint(folder=folder, manifest=manifest, repeated=repeated)


def _entries(folder: Path, shard: str, layout: ParallelLayout, split) -> list[Entry]:
    file = folder / shard / mmfolder.MODEL_FILE
    if not file.is_file():
        raise UserError(f"{file}: no such file.")
    content, found = ptfile.scan(file)
    stage = int(shard.split("_")[3]) if layout.pp > 1 else 0
    entries = []
    for chunk in range(layout.vpp):
        container = mmfolder.container(layout, chunk)
        if container not in content:
            raise UserError(
                f"{file}: no key {container!r} (found {', '.join(map(str, content))}). Is vpp {layout.vpp} right?"
            )
        for key in content[container]:
            if key.endswith("_extra_state"):
                continue
            if (container, key) not in found:
                raise UserError(f"{file}: {container}.{key} is {content[container][key]!r}, expected a tensor.")
            tensor = found[container, key]
            try:
                name = mmfolder.global_key(key, split, stage=stage, chunk=chunk)
            except UserError as error:
                raise UserError(f"{file}: {error} Correct the layer lists.") from error
            entries.append(
                Entry(
                    name=name,
                    file=f"{shard}/{mmfolder.MODEL_FILE}",
                    container=container,
                    key=key,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    offset=tensor.offset,
                    crc32=None,
                )
            )
    return entries
