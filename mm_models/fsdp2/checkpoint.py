"""Where a run starts from and how far it has come: filling weights, resuming everything else.

Any source gives weights. A DCP folder of an iteration, known by its trainer file, also resumes: optimizer, learning rate,
random states and data position, bit for bit at the same number of processes. At another number the random states are drawn
anew and everything else is carried. Writing is in `checkpoint_save`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mm_models.config.strict import leaves, load_json
from mm_models.errors import UserError
from mm_models.fsdp2 import assembly, schedule_lr, weights
from mm_models.fsdp2.optimizer import Optimizer
from mm_models.fsdp2.schedule_lr import Schedule
from mm_models.fsdp2.session import Session, seed
from mm_models.fsdp2.validation import RunPlan
from mm_models.train import log, rng
from mm_models.train.progress import Progress
from mm_models.weights.mmfolder import MANIFEST

TRAINER_FILE = "trainer.pt"
"""Beside the tensors of an iteration: position, schedule, random states, configuration, as plain data."""
SOURCE_KIND = "training"
"""What the manifest of a checkpoint says that a run wrote."""
FREE = {
    "training": {
        "load", "load_format", "load_strict", "allow_missing", "ignore_unexpected", "from_scratch", "no_load_optim",
        "no_load_rng", "load_rank0_and_broadcast", "resume_schedule", "init_model_with_meta_device", "save", "save_interval",
        "save_async", "keep_last", "no_save_optim", "no_save_rng", "eval_interval", "eval_iters", "log_interval",
        "log_metrics", "tensorboard_dir", "exit_interval", "distributed_timeout_minutes", "plugin", "lr", "lr_min", "lr_start",
        "lr_decay_style", "lr_decay_ratio", "lr_warmup_ratio",
    },
}  # fmt: skip
"""Keys that may differ at resume without a word: they change no number, or have their own rule."""


def trainer_file(plan: RunPlan) -> Path | None:
    """The trainer file of the checkpoint that the run resumes from; None where it only takes weights.

    A checkpoint that a run of this target wrote must have one: without it the run would start again at the first sample.
    """
    if plan.source.kind != "dcp":
        return None
    folder = plan.source.folder
    if (folder / TRAINER_FILE).is_file():
        return folder / TRAINER_FILE
    manifest = load_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    if manifest.get("source", {}).get("kind") == SOURCE_KIND:
        raise UserError(
            f"{folder / TRAINER_FILE}: missing, so optimizer, schedule and data position are lost. Restore it, use another "
            "iteration, or take the weights alone through mm-convert dcp_to_hf."
        )
    return None


def check_source(plan: RunPlan) -> None:
    """Refuse a checkpoint that this run cannot resume from, before the processes meet."""
    file, training = trainer_file(plan), plan.config.training
    if file is None:
        return
    state = _load(file)
    if state["iteration"] >= training.train_iters:
        raise UserError(
            f"{file.parent}: stands at iteration {state['iteration']}, and training.train_iters is {training.train_iters}: "
            "nothing to do. Raise train_iters."
        )
    if not training.no_load_optim and state["optimizer_steps"] is None:
        raise UserError(
            f"{file.parent}: holds no optimizer state (it was saved with no_save_optim). "
            "Start it afresh with training.no_load_optim=true."
        )
    _schedule(state, training, where=str(file.parent))


def fill(session: Session, model: torch.nn.Module) -> None:
    """Fill this rank's shards from the plan's source, or draw them from the seed. Every element once, or an error by name."""
    weights.fill(session, assembly.named_tensors(model))


def resume(session: Session, optimizer: Optimizer) -> tuple[Progress, Schedule]:
    """Take up optimizer, schedule and position of a checkpoint of an iteration; the start of a run from anything else."""
    plan, training = session.plan, session.plan.config.training
    file = trainer_file(plan)
    if file is None:
        return Progress(), Schedule.of(training)
    state = _load(file)
    where = str(file.parent)
    lines = [
        f"resumed from {where}: iteration {state['iteration']}, {state['consumed_train_samples']} samples consumed"
    ]
    lines += _changed(state["config"], plan.config.model_dump(mode="json"))
    if state["world"] != session.world:
        lines.append(f"processes: {state['world']} then, {session.world} now")
    if training.no_load_optim:
        lines.append("optimizer state not loaded (training.no_load_optim): the moments start at zero")
        optimizer.resume(0)
    else:
        weights.fill_moments(session, optimizer.moments())
        optimizer.resume(state["optimizer_steps"])
    schedule, told = _schedule(state, training, where=where)
    states, why = _random_states(state, session)
    log.say(session.rank, *lines, *told, *why)
    progress = Progress(
        iteration=state["iteration"],
        consumed_samples=state["consumed_train_samples"],
        skipped=state["skipped_train_iters"],
        data=state.get("data"),
        rng=states,
    )
    return progress, schedule


def _schedule(state: Mapping[str, Any], training, *, where: str) -> tuple[Schedule, list[str]]:
    step = state["iteration"] - state["skipped_train_iters"]
    return schedule_lr.resume(state["schedule"], training, step=step, where=where)


def _random_states(state: Mapping[str, Any], session: Session) -> tuple[tuple[Mapping, ...] | None, list[str]]:
    """The saved random states by rank where they are to be restored, and what to say where they are not."""
    states = state["rng_state"]
    if session.plan.config.training.no_load_rng:
        return None, ["random states not loaded (training.no_load_rng): seeded from training.seed and the iteration"]
    if states is None or len(states) != session.world:
        held = f"those of {len(states)} processes, this run has {session.world}" if states else "not in the checkpoint"
        return None, [f"random states are {held}: seeded from training.seed and the iteration"]
    return tuple(states), []


def restore_rng(session: Session, state: Progress) -> None:
    """Random states as they were when the checkpoint was written; after a resume without them, a seed of its own."""
    if state.rng is not None:
        rng.restore(state.rng[session.rank])
    elif state.iteration:
        seed(session, extra=state.iteration)


def _load(file: Path) -> dict:
    """The content of a trainer file. Its checksums are compared first: torch reads past a flipped byte in silence."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
        if bad is None:
            return torch.load(file, weights_only=True, map_location="cpu")
        why = f"the checksum of {bad} is wrong"
    except Exception as error:  # zip and pickle make anything of a damaged file
        why = str(error)
    raise UserError(f"{file}: damaged ({why}). Restore it, or use another iteration.")


def _changed(saved: Mapping, now: Mapping) -> list[str]:
    """One line on the keys that differ from the saved run, those of `FREE` left out."""
    there, here = dict(leaves(saved)), dict(leaves(now))
    free = {f"{section}.{key}" for section, keys in FREE.items() for key in keys}
    changed = [
        f"{key} was {there.get(key)}, is {here.get(key)}"
        for key in sorted(there | here)
        if key not in free and there.get(key) != here.get(key)
    ]
    return [f"settings that differ from the saved run: {'; '.join(changed)}"] if changed else []
