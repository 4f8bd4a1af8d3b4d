"""The learning rate: Megatron's own schedule to the last digit, and the rule at resume."""

from __future__ import annotations

import pytest
import torch

from mm_models.config.fsdp2.training import Training
from mm_models.errors import UserError
from mm_models.fsdp2.schedule_lr import Schedule, learning_rate, record, resume


def training(**changes) -> Training:
    values = {"train_iters": 20, "lr": 1e-3, "lr_min": 1e-5, "lr_start": 1e-6, "from_scratch": True}
    return Training(**values | changes)


def megatrons(cfg: Training) -> list[float]:
    """Core's scheduler stepped once an iteration."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=cfg.lr_start,
        max_lr=cfg.lr,
        min_lr=cfg.lr_min,
        lr_warmup_steps=cfg.lr_warmup_ratio * cfg.train_iters,
        lr_decay_steps=cfg.lr_decay_ratio * cfg.train_iters,
        lr_decay_style=cfg.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    rates = []
    for _ in range(cfg.train_iters + 5):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup, decay", [(0.0, 1.0), (0.2, 1.0), (0.13, 0.7)])
def test_rates_are_megatrons(style, warmup, decay):
    cfg = training(lr_decay_style=style, lr_warmup_ratio=warmup, lr_decay_ratio=decay)
    rates = [learning_rate(step, Schedule.of(cfg)) for step in range(25)]
    assert rates == megatrons(cfg)
    assert max(rates) <= 1e-3 and (style == "constant") == (rates[-1] == 1e-3)


def test_the_numbers_of_a_cosine():
    cfg = Schedule.of(training(lr_decay_style="cosine", lr_warmup_ratio=0.2, lr_start=0.0, lr_min=0.0))
    assert [learning_rate(s, cfg) for s in (0, 2, 4, 20, 25)] == [0.0, 5e-4, 1e-3, 0.0, 0.0]
    assert learning_rate(12, cfg) == pytest.approx(5e-4, rel=1e-12)


def test_an_equal_schedule_goes_on():
    cfg = training(lr_decay_style="cosine", lr_warmup_ratio=0.2)
    taken, lines = resume(record(Schedule.of(cfg)), cfg, step=7, where="ck")
    assert taken == Schedule.of(cfg)
    assert lines == [
        f"learning rate schedule resumed at step 7, learning rate {learning_rate(7, Schedule.of(cfg)):.6E}"
    ]


def test_a_difference_is_refused_with_both_values_or_chosen():
    saved = record(Schedule.of(training(lr_decay_style="cosine", lr_warmup_ratio=0.2)))
    longer = {"lr_decay_style": "cosine", "lr_warmup_ratio": 0.2, "train_iters": 40}
    with pytest.raises(UserError) as caught:
        resume(saved, training(**longer), step=7, where="ck/iter_0000007")
    told = str(caught.value)
    assert "ck/iter_0000007" in told and "warmup was 4, is now 8; decay was 20, is now 40" in told
    assert "training.resume_schedule=config" in told and "training.resume_schedule=checkpoint" in told
    for winner, want in (("checkpoint", Schedule(**saved)), ("config", Schedule.of(training(**longer)))):
        taken, (line,) = resume(saved, training(**longer, resume_schedule=winner), step=7, where="ck")
        assert taken == want
        assert f"learning rate {learning_rate(7, want):.6E} (the {winner}'s schedule" in line
        other = "YAML's" if winner == "checkpoint" else "saved one"
        left = Schedule.of(training(**longer)) if winner == "checkpoint" else Schedule(**saved)
        assert f"by the {other} it would be {learning_rate(7, left):.6E}" in line


def test_a_longer_constant_run_needs_no_word():
    saved = record(Schedule.of(training()))
    taken, lines = resume(saved, training(train_iters=100, lr_min=0.0, lr_start=0.0), step=7, where="ck")
    assert learning_rate(7, taken) == 1e-3 and "differing" not in lines[0]
    with pytest.raises(UserError, match=r"lr was 0.001, is now 0.002"):
        resume(saved, training(lr=2e-3), step=7, where="ck")
