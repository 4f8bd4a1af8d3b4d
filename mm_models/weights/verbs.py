"""The conversions: Hugging Face to checkpoint, checkpoint to Hugging Face, checkpoint to checkpoint of another layout.

Each verb opens its source from headers alone, describes its target, proves the plan (every source element used, every
target element written once), and only then makes files, under a temporary name: an interrupted or refused run leaves
nothing that loads. Data types stay as they are. `Report` is the closing line.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_models.config.family import Family, family_of, family_of_model
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.split import with_split, without_split
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.weights import hffolder, mmfolder, stores
from mm_models.weights.boxes import Shape
from mm_models.weights.engine import Result, execute
from mm_models.weights.hfoutput import MARK, HfOutput
from mm_models.weights.manifest import Checkpoint, versions
from mm_models.weights.model_map import WeightMap, build
from mm_models.weights.optimizer_file import read_head
from mm_models.weights.output import MmOutput, need_space
from mm_models.weights.plan import Fragment, Plan, plan

Say = Callable[[str], None]
Progress = Callable[[int], Callable[[int], None]]
"""Given the bytes to come, returns what is told the bytes done."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did. `tensors` are tensors written."""

    target: Path
    tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float

    def line(self) -> str:
        rate = self.bytes_written / max(self.seconds, 1e-9) / 1e6
        return (
            f"{self.target}: {self.tensors} tensors, {self.bytes_read:,} bytes read, {self.bytes_written:,} bytes written, "
            f"{self.seconds:.1f} s, {rate:.0f} MB/s, peak RSS {peak_rss() / 1e6:.0f} MB"
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run: worker threads, whether an output of ours may be replaced, where to print, a progress bar."""

    jobs: int | None = None
    overwrite: bool = False
    say: Say = lambda text: print(text, file=sys.stderr)
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """The layout asked for, with optional layer lists."""

    layout: ParallelLayout
    vision_layers: object = None
    text_layers: object = None

    def split(self, model: ModelConfig, say: Say) -> ModelSplit:
        """The stage split, everything that must divide checked; one that was not asked for is printed."""
        model.check_layout(self.layout)
        split = model.split(self.layout, vision_layers=self.vision_layers, text_layers=self.text_layers)
        if self.layout.pp > 1 and None in (self.vision_layers, self.text_layers):
            say(f"layers per stage: {split.describe()}")
        return split


def peak_rss() -> int:
    """Peak resident memory of this process in bytes. (`getrusage` would count a larger parent's before exec.)"""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- Hugging Face -> checkpoint -----------------------------------------------------------------------------------


def hf_to_mm(
    hf: str | Path,
    out: str | Path,
    target: Target,
    *,
    model_json: str | Path | None = None,
    converter: str | None = None,
    options: Options,
) -> Report:
    """Convert the Hugging Face folder `hf` to a release checkpoint in `out`, with its `model.json`.

    With `model_json` the model comes from that file, refused where it disagrees with config.json.
    """
    folder = hffolder.open_folder(hf)
    where = str(folder.path / hffolder.CONFIG)
    family = family_of(folder.config, where)
    _check_converter(converter, family, folder.path)
    if model_json is not None:
        model = load_model_config(model_json)
        family.check_model(model, folder.config, where)
        _check_lists(model, target, str(model_json))
    else:
        model = family.model(folder.config, where)
    _tell_unread(family, folder.config, where, options.say)
    split = target.split(model, options.say)
    wmap = build(with_split(model, split), family.prefixes)
    store = stores.hf_store(folder, wmap, family)
    if store.extras:
        options.say(f"ignored, {len(store.extras)} known extras: {', '.join(extra.name for extra in store.extras)}")
    output = MmOutput(
        wmap=wmap,
        layout=target.layout,
        split=split,
        dtypes=_dtypes(store.fragments),
        source={
            "kind": "huggingface",
            "folder": folder.path.name,
            "expert_layout": store.expert_layout,
            "ignored": [e.name for e in store.extras],
        },
    )
    return _to_mm(output, store.fragments, Path(out), options)


def _check_converter(converter: str | None, family: Family, folder: Path) -> None:
    """Refuse a converter that was named but is another family's."""
    if converter is not None and converter != family.name:
        raise UserError(f"{folder} is converted by {family.name}, not {converter}.")


def _check_lists(model: ModelConfig, target: Target, where: str) -> None:
    """Layer lists given beside a model.json that has its own must be the same."""
    for given, section, name in (
        (target.text_layers, model.text, "llm_pp_layers"),
        (target.vision_layers, model.vision, "vit_pp_layers"),
    ):
        stated = section and section.pipeline_num_layers
        if given and stated and _flat(given) != _flat(stated):
            raise UserError(f"{name} is {given}, {where} says {stated}. Leave the option out, or correct one of them.")


def _flat(lists: object) -> list:
    return [count for row in lists for count in (row if isinstance(row, list) else [row])]


def _tell_unread(family: Family, config: Mapping[str, Any], where: str, say: Say) -> None:
    if unread := family.unread_keys(config):
        say(f"{where}: keys without a counterpart in model.json, not used: {', '.join(unread)}")


# --- checkpoint -> checkpoint -------------------------------------------------------------------------------------


def resplit(
    source: Checkpoint, out: str | Path, target: Target, *, converter: str | None = None, options: Options
) -> Report:
    """Write the checkpoint `source` in another layout, with optimizer state (as one data-parallel rank) and training position.

    Random states belong to ranks that no longer exist; they are left out.
    """
    manifest = source.manifest
    _check_converter(converter, family_of_model(manifest.model), source.folder)
    if (target.layout.pp, target.layout.vpp) == (manifest.layout.pp, manifest.layout.vpp):
        target = replace(
            target,
            vision_layers=target.vision_layers or (manifest.split.vision and manifest.split.vision.nested()),
            text_layers=target.text_layers or (manifest.split.text and manifest.split.text.nested()),
        )
    bare = without_split(manifest.model)
    split = target.split(bare, options.say)
    wmap = build(with_split(bare, split))
    _refuse_same(source.folder, Path(out) / source.folder.name)
    weights, moments = (
        stores.mm_store(source, build(manifest.model)),
        stores.optimizer_store(source, build(manifest.model)),
    )
    head = read_head(source, options.say)
    output = MmOutput(
        wmap=wmap,
        layout=target.layout,
        split=split,
        dtypes=_dtypes(weights),
        iteration=manifest.iteration,
        extra=_training_position(source),
        source={**manifest.source, "resplit_from": manifest.layout.flags()},
        optimizer=head,
    )
    return _to_mm(output, [*weights, *moments], Path(out), options)


def _training_position(source: Checkpoint) -> dict[str, Any]:
    """What a training checkpoint's dense files hold beside tensors: arguments, scheduler, samples consumed."""
    from mm_models.weights import ptfile

    manifest = source.manifest
    files = sorted({entry.file for entry in manifest.tensors if not entry.file.startswith("expert_")})
    if not files or manifest.iteration is None or manifest.source.get("kind") == "foreign":
        return {}
    content, _ = ptfile.scan(source.folder / files[0])
    return {
        key: value
        for key, value in content.items()
        if not key.startswith("model") and not _holds_tensor(value) and key != "rng_state"
    }


def _holds_tensor(value: Any) -> bool:
    from mm_models.weights.ptfile import Spec

    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, Spec)


# --- checkpoint -> Hugging Face -----------------------------------------------------------------------------------


def mm_to_hf(
    source: Checkpoint,
    hf: str | Path,
    out: str | Path,
    *,
    like_reference: bool = False,
    drop_extra: bool = False,
    converter: str | None = None,
    options: Options,
) -> Report:
    """Export a checkpoint as a complete Hugging Face folder in the image of the reference folder `hf`."""
    manifest, out = source.manifest, Path(out)
    reference = hffolder.open_folder(hf)
    where = str(reference.path / hffolder.CONFIG)
    family = family_of(reference.config, where)
    _check_converter(converter, family, reference.path)
    family.check_model(manifest.model, reference.config, where)
    wmap = build(manifest.model, family.prefixes)
    store = stores.hf_store(reference, wmap, family)
    _refuse_same(reference.path, out)
    weights = stores.mm_store(source, wmap)
    held, wanted = _dtypes(weights), _dtypes(store.fragments)
    output = HfOutput(
        reference=reference,
        store=store,
        dtypes=wanted if like_reference else held,
        cast=like_reference,
        drop_extra=drop_extra,
    )
    _tell_dtypes(held, wanted, like_reference, options.say)
    if store.extras:
        what = "dropped" if drop_extra else "copied from the reference"
        options.say(f"{what}, {len(store.extras)} known extras: {', '.join(extra.name for extra in store.extras)}")
    extras = output.extra_sources()
    fragments = output.fragments()
    proven = _proven([*weights, *extras], fragments, wmap, {p.tensor: f.shape for f in extras for p in f.placements})
    _refuse_foreign_output(out, options.overwrite)
    need_space(out, proven.bytes_written)
    mmfolder.remove_stale(out.parent, out.name)
    with _temporary(mmfolder.reserve(out)) as tmp:
        located = output.make_files(tmp, fragments)
        result, seconds = _run(replace(proven, targets=located), options, crc=False)
        provenance = {
            "format": "mm-models export",
            "iteration": manifest.iteration,
            "versions": versions(),
            "flags": manifest.layout.flags(),
        }
        for warning in output.finish(tmp, provenance):
            options.say(f"warning: {warning}")
        mmfolder.finish(tmp)
    return _report(out, fragments, result, seconds)


def _tell_dtypes(held: Mapping[str, str], wanted: Mapping[str, str], cast: bool, say: Say) -> None:
    for name in sorted(set(held) & set(wanted)):
        if held[name] != wanted[name]:
            what = f"cast to {wanted[name]}" if cast else f"written as {held[name]} (--like-reference casts)"
            say(f"data type of {name}: {held[name]} in the checkpoint, {wanted[name]} in the reference; {what}")


def _refuse_foreign_output(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARK).is_file():
        raise UserError(f"{out}: exists already and is not an export of this tool. Give another folder.")
    if not overwrite:
        raise UserError(f"{out}: exists already. Give another folder, or --overwrite.")


# --- common -------------------------------------------------------------------------------------------------------


def _to_mm(output: MmOutput, sources: Iterable[Fragment], out: Path, options: Options) -> Report:
    fragments = output.fragments()
    proven = _proven(sources, fragments, output.wmap)
    stores.check_replicas(proven.replicas)
    if out.exists() and any(out.iterdir()) and not _is_ours(out):
        raise UserError(f"{out}: exists already and is not a checkpoint folder of this tool. Give another folder.")
    need_space(out, proven.bytes_written)
    with _temporary(mmfolder.begin(out, output.iteration, overwrite=options.overwrite)) as tmp:
        located = output.make_files(tmp, fragments)
        result, seconds = _run(replace(proven, targets=located), options, crc=True)
        output.finish(tmp, located, result.crcs)
    return _report(out, fragments, result, seconds)


def _is_ours(out: Path) -> bool:
    """A checkpoint folder of this tool, or what a killed run left of one."""
    known = {"model.json", mmfolder.TRACKER}
    return all(
        child.name in known
        or child.name.startswith(".")
        or ".tmp-" in child.name
        or (child.is_dir() and (child / mmfolder.MANIFEST).is_file())
        for child in out.iterdir()
    )


def _proven(
    sources: Iterable[Fragment], targets: list[Fragment], wmap: WeightMap, more: Mapping[str, Shape] | None = None
) -> Plan:
    shapes = (
        {tensor.name: tensor.shape for tensor in wmap.tensors.values()} | stores.moment_shapes(wmap) | dict(more or {})
    )
    return plan(sources, targets, shapes)


def _run(proven: Plan, options: Options, *, crc: bool) -> tuple[Result, float]:
    start = time.perf_counter()
    advance = options.progress(proven.bytes_read) if options.progress else None
    result = execute(proven, jobs=options.jobs, crc=crc, progress=advance)
    return result, time.perf_counter() - start


@contextmanager
def _temporary(tmp: Path) -> Iterator[Path]:
    """A temporary folder that is gone after a failure."""
    try:
        yield tmp
    except BaseException:
        mmfolder.abandon(tmp)
        raise


def _report(out: Path, fragments: list[Fragment], result: Result, seconds: float) -> Report:
    return Report(
        target=out,
        tensors=len(fragments),
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
        seconds=seconds,
    )


def _dtypes(fragments: Iterable[Fragment]) -> dict[str, str]:
    """Global tensor -> data type of what it is made of (the plan refuses tensors made of two)."""
    return {placement.tensor: fragment.dtype for fragment in fragments for placement in fragment.placements}


def _refuse_same(source: Path, out: Path) -> None:
    if source.resolve() == out.resolve():
        raise UserError(f"{out}: is the source itself. Give another output folder.")
