"""Saving a training checkpoint so that it is either complete or not there, whenever a process is killed.

    <save>/latest_checkpointed_iteration.txt
    <save>/iter_0000100/.metadata, __{rank}_0.distcp, manifest.json     tensors, as torch's own DCP writes and reads them
                        trainer.pt, config.yaml                         position and random states; the resolved configuration

Rank 0 makes a temporary folder that no loader accepts; every rank writes its own file into it; rank 0 gathers the tables,
writes metadata and manifest, renames the folder, and lets the tracker name it. A rank that fails tells the others, so that all
of them raise and none waits. Under `save_async` a rank copies its tensors to the host and a thread writes them; publication is
agreed by all ranks at a later step, or at the end. A second save waits for the first.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mm_models.config.fsdp2 import resolved
from mm_models.errors import UserError
from mm_models.fsdp2 import assembly, schedule_lr
from mm_models.fsdp2.checkpoint import SOURCE_KIND, TRAINER_FILE
from mm_models.fsdp2.shards import Shard, shards
from mm_models.train import agree, log, rng
from mm_models.train.progress import Progress
from mm_models.weights import mmfolder
from mm_models.weights.dcp import writer
from mm_models.weights.dcp.manifest import ItemRecord

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank put into a checkpoint, or why it could not."""

    items: tuple[ItemRecord, ...] = ()
    fault: str | None = None


class _Writing:
    """One save under way. `written` is there when this rank's file is on disk, or has failed."""

    def __init__(self, *, state: Progress, tmp: Path):
        self.state, self.tmp = state, tmp
        self.written: Written | None = None
        self.thread: threading.Thread | None = None


def check_folder(save: str | None) -> None:
    """Make the folder checkpoints go to, or refuse it now: after hours of training it would be too late."""
    if save is None:
        return
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"training.save: {save} cannot be made ({error}). Name another folder.") from error
    if not os.access(save, os.W_OK | os.X_OK):
        raise UserError(f"training.save: {save} cannot be written. Name another folder, or mend its rights.")


def told_of_later(save: str, iteration: int) -> list[str]:
    """A warning where `save` holds iterations behind `iteration`, at which this run starts: its own will come among them."""
    later = [name for name in mmfolder.iterations(Path(save)) if name != mmfolder.RELEASE and _number(name) > iteration]
    if not later:
        return []
    return [
        f"WARNING: {save} holds {', '.join(sorted(later, key=_number)[-3:])} already, and this run starts behind iteration "
        f"{iteration}: its saves will replace them or stand beside them, and {mmfolder.TRACKER} will name this run's"
    ]


class Saver:
    """Saves of one run. Every method is a collective over the world, called at the same step on all ranks."""

    def __init__(self, trainer):
        self._trainer, self._session = trainer, trainer.session
        self._training = trainer.session.plan.config.training
        self._under_way: _Writing | None = None

    def save(self, state: Progress) -> None:
        """Write iteration `state.iteration` into `training.save`; under `save_async` only begin to."""
        self.finish()
        session = self._session
        session.position.at("saving")
        tmp = agree.from_rank_zero(
            lambda: str(mmfolder.begin(self._training.save, state.iteration)), doing="saving (begin)"
        )
        writing = self._under_way = _Writing(state=state, tmp=Path(tmp))
        extra = self._trainer_state(state)
        tensors = self._tensors()
        if self._training.save_async:
            tensors = {key: shard.like(shard.local.to("cpu", copy=True)) for key, shard in tensors.items()}
            writing.thread = threading.Thread(
                target=self._write_in_thread, args=(writing, tensors, extra), name="mm-save", daemon=True
            )
            writing.thread.start()
            return
        try:
            writing.written = self._write(writing, tensors, extra)
        except OSError as error:
            writing.written = Written(fault=f"rank {session.rank}: {error}")
        self._publish()

    def poll(self) -> None:
        """Publish the save under way if every rank has written its part by now."""
        if self._under_way is None:
            return
        done = torch.tensor(int(self._under_way.written is not None), device=self._session.device)
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done.item():
            self._publish()

    def finish(self) -> None:
        """Wait for the save under way and publish it."""
        if self._under_way is None:
            return
        self._session.position.at("waiting for the save under way")
        if self._under_way.thread is not None:
            self._under_way.thread.join()
        self._publish()

    def _tensors(self) -> dict[str, Shard]:
        """DCP key -> this rank's box: weights, persistent buffers, moments and step counts."""
        trainer = self._trainer
        found = {
            writer.weight_key(name): shard for name, shard in shards(assembly.named_tensors(trainer.model)).items()
        }
        if not self._training.no_save_optim:
            steps = torch.tensor(float(trainer.optimizer.steps))
            for name, moments in trainer.optimizer.moments().items():
                found |= {writer.optimizer_key(name, moment): shard for moment, shard in moments.items()}
                found[writer.optimizer_key(name, "step")] = Shard(
                    local=steps, start=(), shape=(), writes=self._session.rank == 0
                )
        return {key: shard for key, shard in found.items() if shard.writes}

    def _trainer_state(self, state: Progress) -> dict[str, Any]:
        """What a resumed run needs beside the tensors, as plain data. Collective."""
        trainer, session = self._trainer, self._session
        states: list[Any] | None = None
        if not self._training.no_save_rng:
            states = [None] * session.world
            dist.all_gather_object(states, rng.capture())
        return {
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_samples,
            "skipped_train_iters": state.skipped,
            "data": state.data,
            "optimizer_steps": None if self._training.no_save_optim else trainer.optimizer.steps,
            "schedule": schedule_lr.record(trainer.schedule),
            "world": session.world,
            "rng_state": states,
            "config": session.plan.config.model_dump(mode="json"),
        }

    def _write_in_thread(self, writing: _Writing, tensors: Mapping[str, Shard], extra: Mapping[str, Any]) -> None:
        try:
            written = self._write(writing, tensors, extra)
        except Exception as error:  # a thread cannot raise for the run: the fault is agreed at the next step
            written = Written(fault=f"rank {self._session.rank}: {type(error).__name__}: {error}")
        writing.written = written

    def _write(self, writing: _Writing, tensors: Mapping[str, Shard], extra: Mapping[str, Any]) -> Written:
        """This rank's files; rank 0 also writes what is not a tensor."""
        if self._session.rank == 0:
            write_file(writing.tmp / TRAINER_FILE, lambda file: torch.save(dict(extra), file))
            text = resolved(self._session.plan.config).encode()
            write_file(writing.tmp / CONFIG_FILE, lambda file: file.write(text))
        boxes = {
            key: writer.ShardToWrite(tensor=shard.local, start=shard.start, shape=shard.shape)
            for key, shard in tensors.items()
        }
        return Written(items=tuple(writer.write_rank_file(writing.tmp, self._session.rank, boxes)))

    def _publish(self) -> None:
        session, writing = self._session, self._under_way
        session.position.at("publishing a checkpoint")
        self._under_way = None
        found: list[Written] | None = [None] * session.world if session.rank == 0 else None
        dist.gather_object(writing.written, found)
        final = agree.from_rank_zero(lambda: str(self._finish_folder(writing, found)), doing="saving (publish)")
        log.say(session.rank, f"saved iteration {writing.state.iteration} to {final}")

    def _finish_folder(self, writing: _Writing, found: list[Written]) -> Path:
        agree.refuse_unwritten(
            writing.tmp, writing.state.iteration, [written.fault for written in found if written.fault]
        )
        plan, state = self._session.plan, writing.state
        writer.finish(
            writing.tmp,
            [item for written in found for item in written.items],
            model=plan.model,
            expert_layout=plan.expert_layout,
            iteration=state.iteration,
            source={
                "kind": SOURCE_KIND,
                "iteration": state.iteration,
                "consumed_train_samples": state.consumed_samples,
                **plan.image_bounds.record(),
            },
        )
        final = mmfolder.publish(writing.tmp)
        self._retire(final)
        return final

    def _retire(self, newest: Path) -> None:
        """Remove all but the `keep_last` newest iterations up to `newest`; never the one this run resumed from."""
        if self._training.keep_last is None:
            return
        resumed = self._session.plan.source.folder
        names = [
            name
            for name in mmfolder.iterations(newest.parent)
            if re.fullmatch(r"iter_\d+", name) and _number(name) <= _number(newest.name)
        ]
        for name in sorted(names, key=_number)[: -self._training.keep_last]:
            folder = newest.parent / name
            if resumed is not None and resumed.resolve() == folder.resolve():
                continue
            retired = folder.with_name(
                f"{name}.tmp-{os.getpid()}"
            )  # a name that no loader accepts, and the next save clears
            os.rename(folder, retired)
            shutil.rmtree(retired)


def _number(name: str) -> int:
    return int(name.removeprefix("iter_"))


def write_file(path: Path, write) -> None:
    """Let `write` fill a new file, and sync it to disk."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
