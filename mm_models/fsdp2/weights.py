"""Weights and moments into the sharded model.

Each rank reads the bytes of its own boxes; under `load_rank0_and_broadcast` rank 0 alone reads, some tensors at a time, and every
rank takes its boxes from what rank 0 sends. Both account for every name the same way, and a fault of one rank is raised by all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from mm_models.fsdp2.session import Session
from mm_models.fsdp2.shards import Shard, shards
from mm_models.fsdp2.sources import KINDS
from mm_models.fsdp2.validation import RunPlan
from mm_models.train import agree, log
from mm_models.weights import live_shards
from mm_models.weights.live_common import grouped
from mm_models.weights.live_shards import LiveShard, LoadReport

AT_A_TIME = 1 << 30
"""Bytes rank 0 holds at most while it reads for the others, one tensor excepted."""
SENT = 64 << 20
"""Bytes of one broadcast at most, one row excepted."""


def fill(session: Session, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` (every parameter and persistent buffer by Hugging Face name) from the plan's source, or draw them."""
    plan, held = session.plan, shards(tensors)
    training = plan.config.training
    if plan.source.kind == "scratch":
        _draw(plan, held)
        log.say(session.rank, f"weights: drawn from seed {training.seed}, the same on every layout")
        return
    if training.load_rank0_and_broadcast and session.world > 1:
        report = _read_and_send(session, held)
    else:
        report = agree.everywhere(lambda: _load(plan, _live(held)), doing="loading weights")
    missing = {name: held[name] for name in report.unfilled}
    _draw(plan, missing, complete=False)
    log.say(session.rank, *_told(report, training.load_rank0_and_broadcast))


def fill_moments(session: Session, moments: Mapping[str, Mapping[str, Shard]]) -> None:
    """Fill the optimizer's moments from the plan's source, a DCP folder."""
    plan = session.plan
    live = {name: _live(each) for name, each in moments.items()}

    def load() -> None:
        live_shards.load_optimizer_shards(
            live, plan.source.folder, model=plan.model, family=plan.family, expert_layout=plan.expert_layout
        )

    agree.everywhere(load, doing="loading the optimizer's state")


def _live(held: Mapping[str, Shard]) -> dict[str, LiveShard]:
    return {name: LiveShard(tensor=one.local, start=one.start, shape=one.shape) for name, one in held.items()}


def _draw(plan: RunPlan, held: Mapping[str, Shard], *, complete: bool = True) -> None:
    live_shards.initialise_shards(
        _live(held),
        model=plan.model,
        family=plan.family,
        expert_layout=plan.expert_layout,
        seed=plan.config.training.seed,
        complete=complete,
    )


def _load(plan: RunPlan, live: Mapping[str, LiveShard]) -> LoadReport:
    training = plan.config.training
    return live_shards.load_shards(
        live,
        plan.source.folder,
        model=plan.model,
        family=plan.family,
        expert_layout=plan.expert_layout,
        declared_layout=plan.config.model.expert_layout,
        load_format=plan.source.kind if plan.source.kind in ("hf", "dcp") else "auto",
        ignore_unexpected=training.ignore_unexpected,
        allow_missing=None if training.load_strict else training.allow_missing,
    )


def _told(report: LoadReport, broadcast: bool) -> list[str]:
    lines = [f"weights: {report.tensors} tensors loaded from {KINDS[report.kind]} {report.folder}"]
    lines[0] += ", read by rank 0 alone" if broadcast else ""
    if report.ignored:
        lines += [f"weights: {len(report.ignored)} tensors of it passed over:", *(f"  {n}" for n in report.ignored)]
    if report.unfilled:
        lines.append(f"weights: {len(report.unfilled)} tensors missing there, drawn from the seed (allow_missing):")
        lines += [f"  {name}" for name in report.unfilled]
    return lines


# --- rank 0 reads for all -----------------------------------------------------------------------------------------


def _read_and_send(session: Session, held: Mapping[str, Shard]) -> LoadReport:
    """Account for everything first, then send group by group. Collective over the world."""
    plan = session.plan
    none = {
        name: LiveShard(tensor=torch.empty(0, dtype=one.local.dtype), start=one.start, shape=one.shape)
        for name, one in held.items()
    }
    report = agree.from_rank_zero(lambda: _load(plan, none), doing="loading weights")
    lacking, read = set(report.unfilled), 0
    sizes = ((name, _nbytes(one)) for name, one in held.items() if name not in lacking)
    for group in grouped(sizes, AT_A_TIME):
        whole: dict[str, torch.Tensor] = {}

        def load(group=group, whole=whole) -> int:
            whole |= {name: torch.empty(held[name].shape, dtype=held[name].local.dtype) for name in group}
            full = {name: LiveShard(tensor=t, start=(0,) * t.ndim, shape=tuple(t.shape)) for name, t in whole.items()}
            return _load(plan, none | full).bytes_read

        read += agree.from_rank_zero(load, doing="loading weights")
        for name in group:
            _send(session, whole.get(name), held[name])
    return LoadReport(
        kind=report.kind,
        folder=report.folder,
        iteration=report.iteration,
        tensors=len(held) - len(lacking),
        bytes_read=read,
        ignored=report.ignored,
        unfilled=report.unfilled,
    )


def _nbytes(shard: Shard) -> int:
    """Of the whole tensor."""
    return torch.Size(shard.shape).numel() * shard.local.element_size()


def _send(session: Session, whole: torch.Tensor | None, shard: Shard) -> None:
    """Every rank takes its box of rank 0's `whole`, which goes out some rows at a time."""
    row = torch.Size(shard.shape[1:]).numel() * shard.local.element_size()
    rows = max(1, SENT // max(1, row))
    for first in range(0, shard.shape[0], rows):
        count = min(rows, shard.shape[0] - first)
        if whole is None:
            part = torch.empty((count, *shard.shape[1:]), dtype=shard.local.dtype, device=session.device)
        else:
            part = whole[first : first + count].to(session.device)
        dist.broadcast(part, src=0)
        low, high = max(first, shard.start[0]), min(first + count, shard.start[0] + shard.local.shape[0])
        if low < high and shard.local.numel():
            inner = tuple(slice(a, a + n) for a, n in zip(shard.start[1:], shard.local.shape[1:]))
            with torch.no_grad():
                shard.local[low - shard.start[0] : high - shard.start[0]].copy_(
                    part[(slice(low - first, high - first), *inner)]
                )
