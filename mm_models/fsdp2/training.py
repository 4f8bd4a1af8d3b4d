"""`train`: the training loop of the FSDP2 target.

Order of a run: join the world, build the model on meta, freeze, recompute, shard, fill, build the optimizer, resume, build the
loader at the resumed position, then step, report and save until done. What is checked at start is printed at start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from mm_models.data.loader import build_loader
from mm_models.fsdp2 import checkpoint, checkpoint_save, schedule_lr, start
from mm_models.fsdp2 import session as sessions
from mm_models.fsdp2.features.profiler import Tools
from mm_models.fsdp2.optimizer import Optimizer
from mm_models.fsdp2.schedule_lr import Schedule
from mm_models.fsdp2.session import Session
from mm_models.fsdp2.step import StepResult, evaluate_step, train_step
from mm_models.fsdp2.validation import RunPlan, option
from mm_models.train import agree, batches, ending, log, tokens, watch
from mm_models.train.evaluation import Evaluation, open_split
from mm_models.train.flops import batch_flops
from mm_models.train.progress import Progress
from mm_models.train.signals import Signals


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything a step and a save need. `model` is sharded and filled; `frozen` are the parts of it that train nothing."""

    session: Session
    model: torch.nn.Module
    optimizer: Optimizer
    schedule: Schedule
    frozen: frozenset[str]

    def next_rate(self, state: Progress) -> float:
        """The learning rate of the step after `state`. The schedule counts the run's steps: an optimizer that starts anew in the
        middle of a run does not start it again."""
        return schedule_lr.learning_rate(state.steps, self.schedule)


def train(plan: RunPlan) -> None:
    """Train as `plan` says. Raises `UserError` for the user's mistakes and `StoppedBySignal` after a clean stop."""
    checkpoint.check_source(plan)
    checkpoint_save.check_folder(plan.config.training.save)
    tokens.check_folder(_dump_folder(plan))
    lines = start.make_deterministic(plan)
    session = sessions.start(plan)
    signals = Signals()
    with watch.Watchdog(session, seconds=60.0 * plan.config.training.distributed_timeout_minutes):
        log.say(session.rank, *plan.lines, *lines)
        trainer, state = set_up(session)
        run(trainer, state, signals)
    torch.distributed.barrier()


def set_up(session: Session) -> tuple[Trainer, Progress]:
    """This rank's filled model, its optimizer and schedule, and how far the run has come."""
    training = session.plan.config.training
    session.position.at("building the model")
    model = start.build(session)
    session.position.at("loading weights")
    checkpoint.fill(session, model)
    session.position.at("building the optimizer")
    optimizer = Optimizer(dict(model.named_parameters()), training)
    start.report(session, model, optimizer)
    session.position.at("resuming")
    state, schedule = checkpoint.resume(session, optimizer)
    frozen = start.frozen_parts(session.plan, optimizer)
    return Trainer(session=session, model=model, optimizer=optimizer, schedule=schedule, frozen=frozen), state


def run(trainer: Trainer, state: Progress, signals: Signals) -> None:
    """Step until `train_iters`, `exit_interval` or a signal; the last step is always saved, once. An evaluation comes after the
    save of its step: what ends the run in it costs no training."""
    session, training = trainer.session, trainer.session.plan.config.training
    loader, evaluation, state = open_loaders(session, state)
    checkpoint.restore_rng(session, state)
    journal = log.Journal(
        speaks=session.rank == session.world - 1,
        interval=training.log_interval,
        train_iters=training.train_iters,
        start=state.iteration,
        metrics=training.log_metrics,
        tensorboard=training.tensorboard_dir,
    )
    saver = checkpoint_save.Saver(trainer) if training.save else None
    if saver:
        log.say(session.rank, *checkpoint_save.told_of_later(training.save, state.iteration))
    stop = None
    tools = Tools(session.plan.config.tools, rank=session.rank, device=session.device)
    with tools, _token_dump(trainer):
        for iteration in range(state.iteration + 1, training.train_iters + 1):
            session.position.step = iteration
            tools.step(iteration)
            state = one_iteration(trainer, state, loader, journal)
            session.position.at("agreeing to go on")
            stop = signals.agreed(session.device)
            leaving = ending.leaving(
                iteration, stop=stop, train_iters=training.train_iters, exit_interval=training.exit_interval
            )
            if saver:
                saver.poll()
                if leaving or (training.save_interval and iteration % training.save_interval == 0):
                    saver.save(state)
            if evaluation and stop is None and evaluation.due(iteration, training.train_iters):
                evaluate(trainer, evaluation, journal)
            if leaving:
                break
    if saver:
        saver.finish()
    saved = f"saved at iteration {state.iteration} in {training.save}" if saver else "not saved (training.save is null)"
    ending.end(journal, state, stop=stop, saved=saved, rank=session.rank, train_iters=training.train_iters)


def _dump_folder(plan: RunPlan) -> str | None:
    dump = plan.config.tools.token_dump
    return dump.dir if dump.enable else None


def _token_dump(trainer: Trainer) -> AbstractContextManager[None]:
    """`tools.token_dump`: what the model is handed on this rank."""
    session, plan = trainer.session, trainer.session.plan
    return tokens.recording(
        trainer.model,
        session.position,
        folder=_dump_folder(plan),
        batches=plan.config.tools.token_dump.batches,
        place=tokens.Place(dp_rank=session.rank, dp_size=plan.dp),
        tokenizer=plan.config.data.dataset_param.preprocess_parameters.model_name_or_path,
    )


def one_iteration(trainer: Trainer, state: Progress, loader, journal: log.Journal) -> Progress:
    """Read, step, report. Returns how far the run has come then."""
    session, plan = trainer.session, trainer.session.plan
    began, rate = time.perf_counter(), trainer.next_rate(state)
    step = read_step(session, loader)
    mine = sum(batch_flops(plan.model, micro.data, frozen=trainer.frozen) for micro in step.micro)
    result = train_step(session, trainer.model, trainer.optimizer, step, rate=rate, flops=mine)
    state = state.after(samples=plan.global_batch_size, skipped=result.skipped)
    journal.add(_report(trainer, state, step, result, rate=rate, seconds=time.perf_counter() - began))
    return state


def evaluate(trainer: Trainer, evaluation: Evaluation, journal: log.Journal) -> None:
    """Evaluate the validation split after the current step, and report it."""
    session = trainer.session

    def sums(loader: Iterator) -> tuple[float, int]:
        step = read_step(session, loader)
        return evaluate_step(session, trainer.model, step.undivided()), step.tokens

    loss, tokens = evaluation.run([trainer.model], sums)
    journal.add_validation(session.position.step, loss, tokens)


def read_step(session: Session, loader: Iterator) -> batches.StepBatches:
    """The micro-batches of one step."""
    session.position.at("reading data")
    plan = session.plan
    return batches.gather_step(
        loader, count=plan.num_microbatches, loss_type=plan.loss_type, counts=True, device=session.device
    )


def _report(
    trainer: Trainer, state: Progress, step: batches.StepBatches, result: StepResult, *, rate: float, seconds: float
) -> log.Iteration:
    plan = trainer.session.plan
    return log.Iteration(
        iteration=state.iteration,
        train_iters=plan.config.training.train_iters,
        consumed_samples=state.consumed_samples,
        seconds=seconds,
        learning_rate=rate,
        next_learning_rate=trainer.next_rate(state),
        global_batch_size=plan.global_batch_size,
        loss=result.loss,
        grad_norm=result.grad_norm,
        tokens=step.all_tokens,
        labelled_tokens=step.tokens,
        skipped=int(result.skipped),
        flops=result.flops,
    )


def open_loaders(session: Session, state: Progress):
    """An endless iterator of this rank's micro-batches from the resumed position on, the evaluation that was asked for, and
    `state` on these data."""
    session.position.at("opening the data")
    plan = session.plan
    training = plan.config.training
    build = partial(
        build_loader,
        plan.config.data,
        model_config=plan.model,
        dp_rank=session.rank,
        dp_size=plan.dp,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        seed=training.seed,
    )
    loader = build(consumed_samples=state.consumed_samples)
    state, told = state.on(agree.same_data(loader))
    log.say(session.rank, *loader.lines(), *told)
    if training.eval_interval is None:
        return iter(loader), None, state
    valid = open_split(build, plan.config.data, option=option)
    agree.same_data(valid)
    evaluation = Evaluation.of(
        valid,
        interval=training.eval_interval,
        iters=training.eval_iters,
        num_microbatches=plan.num_microbatches,
        option=option,
    )
    log.say(session.rank, *evaluation.lines())
    return iter(loader), evaluation, state
