"""The learning-rate schedule: core's `OptimizerParamScheduler`, counted in samples, and what happens to it at resume.

Rule at resume: the schedule of the command line must equal the saved one. A difference is refused with both values, unless
`--override-opt_param-scheduler` (the command line wins) or `--use-checkpoint-opt_param-scheduler` (the saved one wins) says
which to take; the learning rate before and after is printed then. The position is the number of samples stepped so far,
so it is never restarted and never stepped twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from mm_models.errors import UserError
from mm_models.mcore.arguments import option
from mm_models.mcore.validation import RunPlan, decay_iters, warmup_iters

POSITION = "num_steps"


def build(plan: RunPlan, optimizer):
    """A scheduler at sample 0. Building it also sets learning rate and weight decay of every parameter group."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    args, batch = plan.args, plan.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_iters(args) * batch,
        lr_decay_steps=decay_iters(args) * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )


def learning_rate(optimizer) -> float:
    """The learning rate of the parameters that follow the common schedule."""
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    return get_canonical_lr_for_logging(optimizer.param_groups)


def resume(scheduler, saved: Mapping, plan: RunPlan, *, where: str) -> list[str]:
    """Continue a saved schedule by the rule above. Returns lines to print."""
    now, args = scheduler.state_dict(), plan.args
    idle = _without_effect(now, saved)
    changed = [name for name in now if name != POSITION and name not in idle and now[name] != saved[name]]
    if changed and not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        told = "; ".join(f"{name} was {saved[name]}, is now {now[name]}" for name in changed)
        raise UserError(
            f"{where}: the learning-rate schedule differs from the saved run ({told}; steps count samples). "
            f"Resume with the saved run's flags, or choose: {option('override_opt_param_scheduler')} takes the command line's, "
            f"{option('use_checkpoint_opt_param_scheduler')} the saved one."
        )
    before = learning_rate_at(saved, scheduler)
    scheduler.load_state_dict({**saved, **{name: now[name] for name in idle}})
    after = learning_rate(scheduler.optimizer)
    winner = "command line" if args.override_opt_param_scheduler else "checkpoint"
    lines = [f"learning rate schedule resumed at {saved[POSITION]} samples, learning rate {after:.6E}"]
    if changed:
        lines[0] += (
            f" (the {winner}'s schedule; by the saved one it would be {before:.6E}; differing: {', '.join(changed)})"
        )
    return lines


def _without_effect(now: Mapping, saved: Mapping) -> list[str]:
    """Fields that may differ because both schedules are constant in what they describe."""
    found = ["wd_incr_steps"] if now["wd_incr_style"] == saved["wd_incr_style"] == "constant" else []
    return found + (
        ["lr_decay_steps", "min_lr"] if now["lr_decay_style"] == saved["lr_decay_style"] == "constant" else []
    )


def learning_rate_at(saved: Mapping, scheduler) -> float:
    """What a saved schedule gives at its own position."""
    probe = object.__new__(type(scheduler))
    probe.__dict__.update(scheduler.__dict__)
    probe.__dict__.update(
        {
            key: saved[key]
            for key in ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", POSITION)
        }
    )
    return probe.get_lr({})
