"""Where a run starts from and how far it has come: finding `--load`, filling weights, resuming everything else.

`--load` may be a Hugging Face folder (weights only, any topology) or a checkpoint folder of the Megatron target. A
checkpoint of an iteration resumes: weights, optimizer, learning rate, random states and data position, so that losses go on
bit for bit; a release, or any of them under `--finetune`, gives weights alone. DP may change; any other difference of layout
or stage split is refused with both layouts and the `mm-convert resplit` command. Writing is in `checkpoint_save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mm_models.errors import UserError
from mm_models.mcore import optimizer as optim
from mm_models.mcore import schedule_lr
from mm_models.mcore.arguments import option
from mm_models.mcore.session import Session, seed
from mm_models.mcore.validation import RunPlan
from mm_models.train import log, rng
from mm_models.train.progress import Progress
from mm_models.weights import hffolder, live, mmfolder
from mm_models.weights.dcp.folder import is_dcp
from mm_models.weights.manifest import Checkpoint, open_checkpoint, verify

FREE_ARGS = {
    "load", "ckpt_step", "from_scratch", "finetune", "no_load_optim", "no_load_rng", "exit_on_missing_checkpoint",
    "save", "save_interval", "no_save_optim", "mm_model", "mm_data", "plugin", "num_workers", "exit_interval", "check",
    "eval_interval", "eval_iters", "log_interval", "log_metrics", "tensorboard_dir", "check_replicas", "check_batches",
    "distributed_backend", "distributed_timeout_minutes",
    "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler",
}  # fmt: skip
"""Flags that may differ at resume without a word: they change no number."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What `--load` is: `checkpoint` None for a Hugging Face folder."""

    folder: Path
    checkpoint: Checkpoint | None

    @property
    def resumes(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.manifest.iteration is not None


def check_source(plan: RunPlan) -> Source | None:
    """What the run starts from, judged from names and the manifest alone; None from scratch. Refused here: everything that
    would only fail after the processes have met."""
    args = plan.args
    if args.load is None:
        return None
    folder = Path(args.load)
    if is_dcp(folder):
        raise UserError(
            f"--load {folder}: a DCP checkpoint, as the FSDP2 target has them. Convert it: mm-convert dcp_to_mm --dcp {folder} "
            f"--out NEW_FOLDER {plan.layout.flags()}"
        )
    if folder.is_dir() and hffolder.is_hf_folder(folder):
        if args.ckpt_step is not None:
            raise UserError(
                f"--ckpt-step {args.ckpt_step}: {folder} is a Hugging Face folder, which has no iterations. Drop the flag."
            )
        return Source(folder=folder, checkpoint=None)
    checkpoint = open_checkpoint(folder, args.ckpt_step)
    live.require_same_layout(checkpoint, plan.layout, plan.split, folder)
    source = Source(folder=folder, checkpoint=checkpoint)
    if not source.resumes or args.finetune:
        return source
    if checkpoint.manifest.iteration >= args.train_iters:
        raise UserError(
            f"{checkpoint.folder}: stands at iteration {checkpoint.manifest.iteration}, and --train-iters is {args.train_iters}: "
            "nothing to do. Raise --train-iters."
        )
    if not args.no_load_optim and not checkpoint.manifest.optimizer:
        raise UserError(
            f"{checkpoint.folder}: holds no optimizer state. Start it afresh with --no-load-optim, "
            "or take only the weights with --finetune."
        )
    return source


def fill(session: Session, tensors: Mapping[str, torch.Tensor], source: Source | None) -> None:
    """Fill this rank's tensors from `source`, or draw them from the seed. Every tensor exactly once, or an error by name."""
    plan = session.plan
    place = {"model": plan.model, "layout": plan.layout, "coords": session.coords, "split": plan.split}
    if source is None:
        live.initialise(tensors, **place, seed=plan.args.seed)
        log.say(session.rank, f"weights: drawn from seed {plan.args.seed}, the same on every topology")
        return
    folder = source.folder if source.checkpoint is None else source.checkpoint.folder
    live.load_into(tensors, folder, **place)
    kind = "Hugging Face folder" if source.checkpoint is None else "checkpoint"
    log.say(session.rank, f"weights: loaded from {kind} {folder}")


def _folders(session: Session) -> tuple[str, str]:
    """The folders of a checkpoint that hold this rank's dense tensors and its experts; one and the same without a grid of their own."""
    layout, at = session.layout, session.coords
    return mmfolder.dense_dir(layout, tp=at.tp, pp=at.pp), mmfolder.expert_dir(layout, etp=at.etp, pp=at.pp, ep=at.ep)


def resume(trainer, source: Source | None) -> Progress:
    """Take up optimizer, schedule and position of a checkpoint of an iteration; the start of a run from anything else."""
    session, args = trainer.session, trainer.session.plan.args
    if source is None or not source.resumes or args.finetune:
        return Progress()
    folder = source.checkpoint.folder
    dense = _folders(session)[0]
    state = load_file(folder / dense / mmfolder.MODEL_FILE)
    lines = [
        f"resumed from {folder}: iteration {state['iteration']}, {state['consumed_train_samples']} samples consumed"
    ]
    lines += _changed_args(state["args"], args.as_dict())
    if args.no_load_optim:
        lines.append("optimizer state not loaded (--no-load-optim): moments start at zero, masters from the weights")
    else:
        changes = _resume_optimizer(trainer, source.checkpoint)
        lines += [f"optimizer options changed: {'; '.join(changes)}"] if changes else []
    lines += schedule_lr.resume(trainer.scheduler, state["opt_param_scheduler"], session.plan, where=str(folder))
    states = state.get("rng_state")
    if args.no_load_rng:
        states = None
        lines.append("random states not loaded (--no-load-rng): seeded from --seed and the iteration")
    elif not states or len(states) != session.layout.dp:
        lines.append(
            f"random states are those of {len(states or ())} data-parallel ranks, this run has {session.layout.dp}: "
            "seeded from --seed and the iteration"
        )
        states = None
    log.say(session.rank, *lines)
    return Progress(
        iteration=state["iteration"],
        consumed_samples=state["consumed_train_samples"],
        skipped=state["skipped_train_iters"],
        data=state.get("data"),
        rng=None if states is None else tuple(states),
    )


def _resume_optimizer(trainer, checkpoint: Checkpoint) -> list[str]:
    """Masters and moments from the files beside this rank's weights. Returns changed options."""
    folders = set(_folders(trainer.session))
    mine = [moment for moment in checkpoint.manifest.optimizer if moment.file.split("/")[0] in folders]
    if faults := verify(checkpoint, mine):
        raise UserError(
            f"{checkpoint.folder}: damaged: {'; '.join(faults)}. Restore the file, or load another iteration with --ckpt-step."
        )
    files = sorted({moment.file for moment in mine})
    names = optim.parameter_names(trainer.chunks)
    trainable = [name for parameter, name in names.items() if parameter.requires_grad]
    loaded = ((str(checkpoint.folder / file), load_file(checkpoint.folder / file)) for file in files)
    return optim.import_state(trainer.pieces, loaded, trainable=trainable, where=str(checkpoint.folder))


def load_file(path: Path) -> dict:
    """A file of ours, its tensors mapped, not read."""
    return torch.load(path, weights_only=True, mmap=True, map_location="cpu")


def restore_rng(session: Session, state: Progress) -> None:
    """Random states as they were when the checkpoint was written; after a resume without them, a seed of its own."""
    if state.rng is not None:
        rng.restore(state.rng[session.coords.dp])
    elif state.iteration:
        seed(session, extra=state.iteration)


def _changed_args(saved: Mapping, now: Mapping) -> list[str]:
    changed = [
        f"{option(name)} was {saved[name]}, is {now[name]}"
        for name in sorted(now)
        if name not in FREE_ARGS and name in saved and saved[name] != now[name]
    ]
    return [f"flags that differ from the saved run: {'; '.join(changed)}"] if changed else []
