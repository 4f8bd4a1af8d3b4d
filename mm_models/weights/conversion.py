"""What every conversion does: prove the plan, make files under a temporary name, run, publish, report.

Nothing is written before the plan is proven (every source element used, every target element written once); an interrupted or
refused run leaves nothing that loads.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_models.config.bounds import UNSAID, Bounds
from mm_models.config.family import Family
from mm_models.errors import UserError
from mm_models.weights import mmfolder, stores
from mm_models.weights.boxes import Shape
from mm_models.weights.engine import Result, execute
from mm_models.weights.hffolder import HfFolder
from mm_models.weights.hfoutput import MARK, HfOutput, image_bounds
from mm_models.weights.manifest import versions
from mm_models.weights.model_map import WeightMap
from mm_models.weights.output import MmOutput, need_space
from mm_models.weights.plan import Fragment, Plan, plan
from mm_models.weights.stores import HfStore

Say = Callable[[str], None]
Progress = Callable[[int], Callable[[int], None]]
"""Given the bytes to come, returns what is told the bytes done."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did. `tensors` are tensors written; `expert_layout` is that of a DCP folder with experts."""

    target: Path
    tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    expert_layout: str | None = None

    def line(self) -> str:
        rate = self.bytes_written / max(self.seconds, 1e-9) / 1e6
        return (
            f"{self.target}: {self.tensors} tensors, {self.bytes_read:,} bytes read, {self.bytes_written:,} bytes written, "
            f"{self.seconds:.1f} s, {rate:.0f} MB/s, peak RSS {peak_rss() / 1e6:.0f} MB"
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run: worker threads, whether an output of ours may be replaced, where to print, a progress bar; and pixel bounds for
    the processor of a Hugging Face folder that is written, in place of those of training."""

    jobs: int | None = None
    overwrite: bool = False
    say: Say = lambda text: print(text, file=sys.stderr)
    progress: Progress | None = None
    bounds: Bounds = UNSAID


def peak_rss() -> int:
    """Peak resident memory of this process in bytes. (`getrusage` would count a larger parent's before exec.)"""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_converter(converter: str | None, family: Family, folder: Path) -> None:
    """Refuse a converter that was named but is another family's."""
    if converter is not None and converter != family.name:
        raise UserError(f"{folder} is converted by {family.name}, not {converter}.")


def tell_unread(family: Family, config: Mapping[str, Any], where: str, say: Say) -> None:
    if unread := family.unread_keys(config):
        say(f"{where}: keys without a counterpart in model.json, not used: {', '.join(unread)}")


def export(
    weights: Sequence[Fragment],
    reference: HfFolder,
    store: HfStore,
    wmap: WeightMap,
    out: str | Path,
    provenance: Mapping[str, Any],
    *,
    source: Mapping[str, Any] | None,
    like_reference: bool,
    drop_extra: bool,
    options: Options,
) -> Report:
    """Write `weights` as a complete Hugging Face folder in the image of `reference`; `provenance` goes into its mark. `source` is
    what the checkpoint's manifest says it came from."""
    out = Path(out)
    refuse_same(reference.path, out)
    change = image_bounds(reference.path, source, options.bounds, options.say)
    held, wanted = dtypes(weights), dtypes(store.fragments)
    output = HfOutput(
        reference=reference,
        store=store,
        dtypes=wanted if like_reference else held,
        cast=like_reference,
        drop_extra=drop_extra,
        change=change,
    )
    tell_dtypes(held, wanted, like_reference, options.say)
    if store.extras:
        what = "dropped" if drop_extra else "copied from the reference"
        options.say(f"{what}, {len(store.extras)} known extras: {', '.join(extra.name for extra in store.extras)}")
    extras = output.extra_sources()
    fragments = output.fragments()
    planned = proven([*weights, *extras], fragments, wmap, {p.tensor: f.shape for f in extras for p in f.placements})
    refuse_foreign_output(out, options.overwrite)
    need_space(out, planned.bytes_written)
    mmfolder.remove_stale(out.parent, out.name)
    with temporary(mmfolder.reserve(out)) as tmp:
        located = output.make_files(tmp, fragments)
        result, seconds = run(replace(planned, targets=located), options, crc=False)
        said = {"format": "mm-models export", "versions": versions(), **provenance}
        for warning in output.finish(tmp, said):
            options.say(f"warning: {warning}")
        mmfolder.finish(tmp)
    return report(out, fragments, result, seconds)


def tell_dtypes(held: Mapping[str, str], wanted: Mapping[str, str], cast: bool, say: Say) -> None:
    for name in sorted(set(held) & set(wanted)):
        if held[name] != wanted[name]:
            what = f"cast to {wanted[name]}" if cast else f"written as {held[name]} (--like-reference casts)"
            say(f"data type of {name}: {held[name]} in the checkpoint, {wanted[name]} in the reference; {what}")


def refuse_foreign_output(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARK).is_file():
        raise UserError(f"{out}: exists already and is not an export of this tool. Give another folder.")
    if not overwrite:
        raise UserError(f"{out}: exists already. Give another folder, or --overwrite.")


def to_mm(output: MmOutput, sources: Iterable[Fragment], out: Path, options: Options) -> Report:
    fragments = output.fragments()
    planned = proven(sources, fragments, output.wmap)
    stores.check_replicas(planned.replicas)
    if out.exists() and any(out.iterdir()) and not is_ours(out):
        raise UserError(f"{out}: exists already and is not a checkpoint folder of this tool. Give another folder.")
    need_space(out, planned.bytes_written)
    with temporary(mmfolder.begin(out, output.iteration, overwrite=options.overwrite)) as tmp:
        located = output.make_files(tmp, fragments)
        result, seconds = run(replace(planned, targets=located), options, crc=True)
        output.finish(tmp, located, result.crcs)
    return report(out, fragments, result, seconds)


def is_ours(out: Path) -> bool:
    """A checkpoint folder of this tool, or what a killed run left of one."""
    known = {"model.json", mmfolder.TRACKER}
    return all(
        child.name in known
        or child.name.startswith(".")
        or ".tmp-" in child.name
        or (child.is_dir() and (child / mmfolder.MANIFEST).is_file())
        for child in out.iterdir()
    )


def proven(
    sources: Iterable[Fragment], targets: list[Fragment], wmap: WeightMap, more: Mapping[str, Shape] | None = None
) -> Plan:
    shapes = (
        {tensor.name: tensor.shape for tensor in wmap.tensors.values()} | stores.moment_shapes(wmap) | dict(more or {})
    )
    return plan(sources, targets, shapes)


def run(planned: Plan, options: Options, *, crc: bool) -> tuple[Result, float]:
    start = time.perf_counter()
    advance = options.progress(planned.bytes_read) if options.progress else None
    result = execute(planned, jobs=options.jobs, crc=crc, progress=advance)
    return result, time.perf_counter() - start


@contextmanager
def temporary(tmp: Path) -> Iterator[Path]:
    """A temporary folder that is gone after a failure."""
    try:
        yield tmp
    except BaseException:
        mmfolder.abandon(tmp)
        raise


def report(out: Path, fragments: list[Fragment], result: Result, seconds: float) -> Report:
    return Report(
        target=out,
        tensors=len(fragments),
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
        seconds=seconds,
    )


def dtypes(fragments: Iterable[Fragment]) -> dict[str, str]:
    """Global tensor -> data type of what it is made of (the plan refuses tensors made of two)."""
    return {placement.tensor: fragment.dtype for fragment in fragments for placement in fragment.placements}


def refuse_same(source: Path, out: Path) -> None:
    if source.resolve() == out.resolve():
        raise UserError(f"{out}: is the source itself. Give another output folder.")
