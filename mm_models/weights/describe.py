"""What a folder is, from names, headers and manifests; no weights are read. The text of `mm-convert inspect`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mm_models.config.family import family_of
from mm_models.errors import UserError
from mm_models.weights import foreign, hffolder, mmfolder, ptfile
from mm_models.weights.boxes import volume
from mm_models.weights.dcp import folder as dcp_folder
from mm_models.weights.dcp.writer import OPTIMIZER
from mm_models.weights.dtypes import itemsize
from mm_models.weights.manifest import EXPERT_LAYOUT, open_checkpoint


def describe(path: Path) -> list[str]:
    """Lines that say the kind of a folder, its layout, prefixes, expert layout, data types and first names."""
    if dcp_folder.is_dcp(path):
        return _dcp(path)
    if hffolder.is_hf_folder(path):
        return _hugging_face(path)
    if foreign.is_foreign(path):
        return _foreign(path)
    return _checkpoint(path)


def _hugging_face(path: Path) -> list[str]:
    folder = hffolder.open_folder(path)
    names = sorted(folder.tensors)
    lines = [f"{path}: a Hugging Face folder", f"  model_type: {folder.config.get('model_type')}"]
    try:
        lines.append(f"  converter: {family_of(folder.config, str(path)).name}")
    except UserError:
        lines.append("  converter: none")
    if folder.expert_layout is not None:
        lines.append(f"  experts merged as {folder.expert_layout}, which is not Hugging Face's orientation")
    per_expert, stacked = (any(mark in name for name in names) for mark in (".experts.0.", ".experts.gate_up_proj"))
    layout = " and ".join(what for what, there in (("per_expert", per_expert), ("stacked_hf", stacked)) if there)
    lines.append(
        f"  files: {len(folder.headers)}, index: {'yes' if folder.index is not None else 'no'}, expert layout: {layout or 'no experts'}"
    )
    tensors = [(t.dtype, t.nbytes) for t in folder.tensors.values()]
    return lines + _common(tensors, names, _prefixes(names))


def _checkpoint(path: Path) -> list[str]:
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    names = sorted({entry.name for entry in manifest.tensors})
    iteration = "release" if manifest.iteration is None else f"iteration {manifest.iteration}"
    lines = [f"{checkpoint.folder}: a checkpoint of the Megatron target, {iteration}"]
    if checkpoint.folder != path:
        lines.append(f"  complete checkpoints here: {', '.join(mmfolder.iterations(path))}")
    lines += [
        f"  layout: {manifest.layout.flags()}, layers {manifest.split.describe()}, expert layout: {_experts(names, EXPERT_LAYOUT)}",
        f"  model: {manifest.model.model_id}, source: {dict(manifest.source)}",
        f"  files: {len({entry.file for entry in manifest.tensors})}, optimizer state: {'yes' if manifest.optimizer else 'no'}",
    ]
    return lines + _common([(entry.dtype, entry.nbytes) for entry in manifest.tensors], names, _prefixes(names))


def _dcp(path: Path) -> list[str]:
    folder = dcp_folder.open_dcp(path)
    said, tensors = folder.manifest, folder.metadata.tensors
    iteration = "release" if folder.iteration is None else f"iteration {folder.iteration}"
    lines = [f"{folder.path}: a PyTorch distributed checkpoint (DCP), {iteration}"]
    if folder.path != path:
        lines.append(f"  complete checkpoints here: {', '.join(dcp_folder.iterations(path))}")
    if said is None:
        stacks = [f", e.g. of {key} {t.shape}" for key, t in tensors.items() if key.endswith(".experts.gate_up_proj")]
        declare = f"its expert layout must be declared{''.join(stacks[:1])}"
        lines.append(f"  no manifest (a folder of the field): {_experts(tensors, declare)}")
    else:
        lines.append(f"  expert layout: {_experts(tensors, said.expert_layout)}, dcp_prefix: {said.dcp_prefix!r}")
        lines.append(f"  model: {said.model.model_id}, source: {dict(said.source)}")
    files = {item.place.file for tensor in tensors.values() for item in tensor.items}
    moments = ", ".join(dcp_folder.present_moments(folder)) or "no"
    lines.append(f"  files: {len(files)}, optimizer state: {moments}, other entries: {len(folder.metadata.blobs)}")
    names = sorted(key for key in tensors if not key.startswith(OPTIMIZER))
    sizes = [(tensors[name].dtype, volume(tensors[name].shape) * itemsize(tensors[name].dtype)) for name in names]
    return lines + _common(sizes, names, _prefixes(names, 3))


def _foreign(path: Path) -> list[str]:
    folder = (
        path
        if any(path.glob("mp_rank_*"))
        else next(child for child in sorted(path.iterdir()) if any(child.glob("mp_rank_*")))
    )
    ranks = sorted(child.name for child in folder.glob("mp_rank_*"))
    content, found = ptfile.scan(folder / ranks[0] / mmfolder.MODEL_FILE)
    names = sorted(str(place[-1]) for place in found)
    lines = [
        f"{folder}: rank folders without a manifest (a checkpoint of the field)",
        f"  ranks: {len(ranks)} ({', '.join(ranks[:8])}{', ...' if len(ranks) > 8 else ''})",
        f"  keys of {ranks[0]}: {', '.join(map(str, content))}",
    ]
    tensors = [(tensor.dtype, volume(tensor.shape) * itemsize(tensor.dtype)) for tensor in found.values()]
    return lines + _common(tensors, names, _prefixes(names))


def _experts(names: Iterable[str], layout: str) -> str:
    return layout if any(".experts." in name for name in names) else "no experts"


def _common(tensors: Iterable[tuple[str, int]], names: list[str], prefixes: Mapping[str, int]) -> list[str]:
    dtypes: dict[str, tuple[int, int]] = {}
    for dtype, nbytes in tensors:
        count, total = dtypes.get(dtype, (0, 0))
        dtypes[dtype] = (count + 1, total + nbytes)
    shown = ", ".join(f"{dtype} {count} ({total:,} bytes)" for dtype, (count, total) in sorted(dtypes.items()))
    return [
        f"  data types: {shown}",
        f"  prefixes: {', '.join(f'{prefix} ({count})' for prefix, count in prefixes.items())}",
        f"  {len(names)} names, the first: {', '.join(names[:5])}",
    ]


def _prefixes(names: list[str], depth: int = 2) -> dict[str, int]:
    """The first components of every name, counted."""
    counts: dict[str, int] = {}
    for name in names:
        prefix = ".".join(name.split(".")[:depth])
        counts[prefix] = counts.get(prefix, 0) + 1
    return counts
