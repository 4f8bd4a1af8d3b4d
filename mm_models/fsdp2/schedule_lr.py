"""The learning rate as a function of the steps taken so far, and what happens to it at resume.

Linear warm-up from `lr_start` to `lr` over `lr_warmup_ratio · train_iters` steps, then `constant`, or `linear` or `cosine` down to
`lr_min` at step `lr_decay_ratio · train_iters`, as Megatron's schedule computes them. A skipped step takes none.

Rule at resume: the schedule of the YAML must equal the saved one, number by number. A difference that has an effect is refused
with both values, unless `training.resume_schedule` says which to take: `config` or `checkpoint`. So a longer `train_iters` needs
a word where it stretches warm-up or decay, and none under a constant rate without warm-up. The position is never restarted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from mm_models.config.fsdp2.training import Training
from mm_models.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`warmup` and `decay` count steps from the start of the run; both may end between two steps."""

    style: str
    lr: float
    lr_start: float
    lr_min: float
    warmup: float
    decay: float

    @classmethod
    def of(cls, training: Training) -> Schedule:
        return cls(
            style=training.lr_decay_style,
            lr=training.lr,
            lr_start=training.lr_start,
            lr_min=training.lr_min,
            warmup=training.lr_warmup_ratio * training.train_iters,
            decay=training.lr_decay_ratio * training.train_iters,
        )

    def without_effect(self) -> set[str]:
        """Fields that change no learning rate of this schedule."""
        idle = {"lr_min", "decay"} if self.style == "constant" else set()
        return idle | ({"lr_start"} if self.warmup == 0 else set())


def learning_rate(step: int, schedule: Schedule) -> float:
    """The rate of the step after `step` steps taken (0 for the first)."""
    top, low = schedule.lr, schedule.lr_min
    if schedule.warmup > 0 and step <= schedule.warmup:
        return schedule.lr_start + (top - schedule.lr_start) * step / schedule.warmup
    if schedule.style == "constant":
        return top
    if step > schedule.decay:
        return low
    done = (step - schedule.warmup) / (schedule.decay - schedule.warmup)
    left = 1.0 - done if schedule.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return low + left * (top - low)


def resume(
    saved: Mapping[str, float | str], training: Training, *, step: int, where: str
) -> tuple[Schedule, list[str]]:
    """The schedule to go on with by the rule above, and lines to print. `saved` is `asdict` of the saved one."""
    now, before = Schedule.of(training), Schedule(**saved)
    idle = now.without_effect() & before.without_effect()
    names = [field.name for field in fields(Schedule) if field.name not in idle]
    changed = [name for name in names if getattr(now, name) != getattr(before, name)]
    if changed and training.resume_schedule is None:
        told = "; ".join(
            f"{name} was {_shown(getattr(before, name))}, is now {_shown(getattr(now, name))}" for name in changed
        )
        raise UserError(
            f"{where}: the learning-rate schedule differs from the saved run ({told}; warmup and decay count steps). "
            "Resume with the saved run's values, or choose: training.resume_schedule=config takes the YAML's, "
            "training.resume_schedule=checkpoint the saved one."
        )
    taken = before if training.resume_schedule == "checkpoint" else now
    line = f"learning rate schedule resumed at step {step}, learning rate {learning_rate(step, taken):.6E}"
    if changed:
        other, left = ("YAML's", now) if taken is before else ("saved one", before)
        line += (
            f" (the {training.resume_schedule}'s schedule; by the {other} it would be {learning_rate(step, left):.6E}; "
            f"differing: {', '.join(changed)})"
        )
    return taken, [line]


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.10g}"


def record(schedule: Schedule) -> dict[str, float | str]:
    """What a checkpoint keeps, plain data."""
    return asdict(schedule)
