"""Saving a training checkpoint so that it is either complete or not there, whenever a process is killed.

Rank 0 makes a temporary folder that no loader accepts; every rank writes its own files into it, synced to disk, with a
CRC-32 per tensor; rank 0 gathers the tables, writes the manifest, renames the folder, and lets the tracker name it. A rank
that fails tells the others, so that all of them raise and none waits.

Who writes what: dense tensors by data-parallel rank 0 of each (tp, pp), experts by expert-data-parallel rank 0 of each
(etp, pp, ep), optimizer pieces by every rank that has some of its own (under `--use-distributed-optimizer` all of them).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.serialization import config as serialization

from mm_models.mcore import optimizer as optim
from mm_models.mcore import start
from mm_models.mcore.session import Session
from mm_models.train import agree, log, rng
from mm_models.train.progress import Progress
from mm_models.weights import mmfolder, ptfile
from mm_models.weights.dtypes import dtype_name
from mm_models.weights.manifest import Entry, Manifest, Moment, write_manifest

VERSION = 3.0
PARTS = ("master", *optim.MOMENTS)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank put into a checkpoint, or why it could not."""

    tensors: tuple[Entry, ...] = ()
    optimizer: tuple[Moment, ...] = ()
    fault: str | None = None


def save(trainer, state: Progress) -> Path:
    """Write iteration `state.iteration` into `--save`; its folder. Collective over the world."""
    session, args = trainer.session, trainer.session.plan.args
    tmp = Path(agree.from_rank_zero(lambda: str(mmfolder.begin(args.save, state.iteration)), doing="saving (begin)"))
    states = _gather_rng()
    try:
        written = write(trainer, state, tmp, states)
    except OSError as error:
        written = Written(fault=f"rank {session.rank}: {error}")
    found: list[Written] | None = [None] * session.layout.world if session.rank == 0 else None
    dist.gather_object(written, found)
    final = Path(agree.from_rank_zero(lambda: str(_publish(session, state, tmp, found)), doing="saving (publish)"))
    log.say(session.rank, f"saved iteration {state.iteration} to {final}")
    return final


def _publish(session: Session, state: Progress, tmp: Path, found: list[Written]) -> Path:
    agree.refuse_unwritten(tmp, state.iteration, [written.fault for written in found if written.fault])
    plan = session.plan
    manifest = Manifest(
        iteration=state.iteration,
        model=plan.model,
        layout=plan.layout,
        split=plan.split,
        tensors=tuple(entry for written in found for entry in written.tensors),
        optimizer=tuple(moment for written in found for moment in written.optimizer),
        source={
            "kind": "training",
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_samples,
            **plan.image_bounds.record(),
        },
    )
    write_manifest(tmp, manifest)
    return mmfolder.publish(tmp)


def _gather_rng() -> list[Mapping]:
    """The random states of this rank's data-parallel peers, by data-parallel rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, rng.capture(), group=group)
    return states


def write(trainer, state: Progress, tmp: Path, states: list[Mapping]) -> Written:
    """This rank's files."""
    session = trainer.session
    layout, at = session.layout, session.coords
    dense = mmfolder.dense_dir(layout, tp=at.tp, pp=at.pp)
    experts = mmfolder.expert_dir(layout, etp=at.etp, pp=at.pp, ep=at.ep)
    tensors: list[Entry] = []
    common = {"checkpoint_version": VERSION, "iteration": state.iteration}
    if at.dp == 0:
        extra = common | training_state(trainer, state) | {"rng_state": states}
        tensors += _write_weights(trainer, tmp, dense, extra, lambda p: experts == dense or not _is_expert(p))
    if at.edp == 0 and experts != dense and _has_experts(trainer):
        tensors += _write_weights(trainer, tmp, experts, common, _is_expert)
    moments = [] if session.plan.args.no_save_optim else _write_optimizer(trainer, tmp, dense, experts)
    return Written(tensors=tuple(tensors), optimizer=tuple(moments))


def training_state(trainer, state: Progress) -> dict[str, Any]:
    """What a resumed run needs beside weights, optimizer and random states, as plain data."""
    return {
        "args": trainer.session.plan.args.as_dict(),
        "consumed_train_samples": state.consumed_samples,
        "skipped_train_iters": state.skipped,
        "data": state.data,
        "opt_param_scheduler": trainer.scheduler.state_dict(),
    }


def _is_expert(tensor: torch.Tensor) -> bool:
    return not getattr(tensor, "allreduce", True)


def _has_experts(trainer) -> bool:
    return any(_is_expert(p) for chunk in trainer.chunks for p in chunk.parameters())


def _write_weights(trainer, tmp: Path, folder: str, extra: Mapping[str, Any], wanted) -> list[Entry]:
    """One `model_optim_rng.pt` with the tensors that `wanted` picks; their entries."""
    session = trainer.session
    split, content, names = session.plan.split, dict(extra), {}
    for chunk, module in enumerate(trainer.chunks):
        container = mmfolder.container(session.layout, chunk)
        held = {name: tensor for name, tensor in start.named_tensors([module]).items() if wanted(tensor)}
        content[container] = {mmfolder.local_key(name, split): _copy(tensor) for name, tensor in held.items()}
        names |= {(container, mmfolder.local_key(name, split)): name for name in held}
    file = f"{folder}/{mmfolder.MODEL_FILE}"
    found = write_file(tmp / file, content)
    return [
        Entry(
            name=name,
            file=file,
            container=path[0],
            key=path[1],
            dtype=dtype_name(content[path[0]][path[1]].dtype),
            shape=tuple(content[path[0]][path[1]].shape),
            offset=found[path].offset,
            crc32=_crc(content[path[0]][path[1]]),
        )
        for path, name in names.items()
    ]


def _write_optimizer(trainer, tmp: Path, dense: str, experts: str) -> list[Moment]:
    """`optim_dpNNN.pt` beside the weights the pieces belong to; a rank with no piece of its own writes none."""
    at, sharded = trainer.session.coords, trainer.session.plan.args.use_distributed_optimizer
    groups = {dense: (at.dp, [piece for piece in trainer.pieces if dense == experts or not piece.expert])}
    if experts != dense:
        groups[experts] = (at.edp, [piece for piece in trainer.pieces if piece.expert])
    moments: list[Moment] = []
    for folder, (rank, pieces) in groups.items():
        if pieces and (sharded or rank == 0):
            moments += _write_pieces(tmp, f"{folder}/{mmfolder.optimizer_file(rank)}", pieces)
    return moments


def _write_pieces(tmp: Path, file: str, pieces: Iterable[optim.Shard]) -> list[Moment]:
    content = optim.export_state(list(pieces))
    for saved in content["params"].values():
        saved.update({part: _copy(saved[part]) for part in PARTS})
    found = write_file(tmp / file, content)
    return [
        Moment(
            name=name,
            part=part,
            file=file,
            dtype=dtype_name(saved[part].dtype),
            shape=saved["shape"],
            range=saved["range"],
            offset=found["params", name, part].offset,
            crc32=_crc(saved[part]),
        )
        for name, saved in content["params"].items()
        for part in PARTS
    ]


def write_file(path: Path, content: Mapping[str, Any]) -> dict[tuple, ptfile.Found]:
    """Write `content` to disk for good; where its tensors lie."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with serialization.patch("save.storage_alignment", ptfile.ALIGNMENT), path.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())
    mmfolder.sync_folder(path.parent)
    return ptfile.scan(path)[1]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a storage of its own: a view would be saved with the whole buffer behind it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())
