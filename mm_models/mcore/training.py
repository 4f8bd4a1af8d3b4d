"""`pretrain`: the training loop of the Megatron target, around the callbacks of an entry script.

Order of a run: validate, join the world, build this rank's chunks, fill them, wrap them, build optimizer and schedule, resume,
build the loader at the resumed position, then step, report and save until done. What is checked at start is printed at start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from mm_models import device as devices
from mm_models import versions
from mm_models.mcore import checkpoint, checkpoint_save, replicas, schedule_lr, start, validation
from mm_models.mcore import optimizer as optim
from mm_models.mcore import session as sessions
from mm_models.mcore.arguments import Arguments, option
from mm_models.mcore.session import Session
from mm_models.mcore.step import StepResult, evaluate_step, prepare_chunks, train_step
from mm_models.registry import load_plugins
from mm_models.train import agree, batches, ending, log, tokens, watch
from mm_models.train.evaluation import Evaluation
from mm_models.train.progress import Progress
from mm_models.train.session import launcher_rank, world_size
from mm_models.train.signals import Signals

CAREFUL_STEPS = 5
"""After a start, sample ids are compared across each model-parallel group in this many steps, then every `--check-batches`."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Everything a step needs. `chunks` are DDP-wrapped, `pieces` what this rank's optimizer steps."""

    session: Session
    chunks: list[torch.nn.Module]
    optimizer: object
    scheduler: object
    pieces: list[optim.Shard]


def pretrain(datasets_provider: Callable, model_provider: Callable, forward_step: Callable, args: Arguments) -> None:
    """Train as `args` say. Raises `UserError` for the user's mistakes and `StoppedBySignal` after a clean stop."""
    versions.check("megatron-core")
    load_plugins(args.plugin)
    plan = validation.plan(args, world_size(), device=devices.device_type())
    start.check_freeze(plan)
    tokens.check_folder(args.dump_tokens)
    source = checkpoint.check_source(plan)
    if args.check:
        log.say(
            launcher_rank(),
            *start.plan_lines(plan),
            "check passed: flags, model.json, data.json, layout and --load fit together.",
        )
        return
    session = sessions.start(plan)
    signals = Signals()
    with watch.Watchdog(session, seconds=60.0 * args.distributed_timeout_minutes):
        log.say(session.rank, *start.plan_lines(plan))
        trainer, state = set_up(session, model_provider, source)
        run(trainer, state, datasets_provider, forward_step, signals)
    torch.distributed.barrier()


def set_up(session: Session, model_provider: Callable, source: checkpoint.Source | None) -> tuple[Trainer, Progress]:
    """This rank's filled model, its optimizer and schedule, and how far the run has come."""
    plan = session.plan
    session.position.at("building the model")
    bare = start.build(session, model_provider)
    session.position.at("loading weights")
    tensors = start.named_tensors(bare)
    checkpoint.fill(session, tensors, source)
    if plan.args.check_replicas:
        replicas.check_replicas(start.replicated(tensors, plan.model), session, when="after loading")
    start.report(session, bare)
    chunks = start.wrap(bare, plan.args, plan.layout)
    prepare_chunks(chunks)
    session.position.at("building the optimizer")
    optimizer = optim.build(plan.args, chunks)
    scheduler = schedule_lr.build(plan, optimizer)
    pieces = optim.shards(optimizer, chunks)
    trainer = Trainer(session=session, chunks=chunks, optimizer=optimizer, scheduler=scheduler, pieces=pieces)
    start.report_decay(session, pieces, optimizer)
    return trainer, checkpoint.resume(trainer, source)


def run(
    trainer: Trainer, state: Progress, datasets_provider: Callable, forward_step: Callable, signals: Signals
) -> None:
    """Step until `--train-iters`, `--exit-interval` or a signal; the last step is always saved, once. An evaluation comes after the
    save of its step: what ends the run in it costs no training."""
    session, args = trainer.session, trainer.session.plan.args
    loader, evaluation, state = open_loaders(trainer, state, datasets_provider)
    checkpoint.restore_rng(session, state)
    journal = log.Journal(
        speaks=session.rank == torch.distributed.get_world_size() - 1,
        interval=args.log_interval,
        train_iters=args.train_iters,
        start=state.iteration,
        metrics=args.log_metrics,
        tensorboard=args.tensorboard_dir,
    )
    first, saved_at, stop = state.iteration + 1, state.iteration, None
    with _token_dump(trainer):
        for iteration in range(first, args.train_iters + 1):
            session.position.step = iteration
            state = one_iteration(
                trainer, state, loader, forward_step, journal, careful=iteration < first + CAREFUL_STEPS
            )
            session.position.at("agreeing to go on")
            stop = signals.agreed(session.device)
            leaving = ending.leaving(
                iteration, stop=stop, train_iters=args.train_iters, exit_interval=args.exit_interval
            )
            if args.save and (leaving or (args.save_interval and iteration % args.save_interval == 0)):
                save(trainer, state)
                saved_at = iteration
            if evaluation and stop is None and evaluation.due(iteration, args.train_iters):
                evaluate(trainer, evaluation, forward_step, journal)
            if leaving:
                break
    saved = f"saved at iteration {saved_at} in {args.save}" if saved_at == state.iteration else "not saved (no --save)"
    ending.end(journal, state, stop=stop, saved=saved, rank=session.rank, train_iters=args.train_iters)


def _token_dump(trainer: Trainer) -> AbstractContextManager[None]:
    """`--dump-tokens`: what this rank's first chunk is handed, which every other of its chunks is handed too."""
    session, args = trainer.session, trainer.session.plan.args
    coords, layout = session.coords, session.layout
    return tokens.recording(
        trainer.chunks[0],
        session.position,
        folder=args.dump_tokens,
        batches=args.dump_batches,
        place=tokens.Place(dp_rank=coords.dp, dp_size=layout.dp, stage=coords.pp, stages=layout.pp),
        tokenizer=session.plan.data.dataset_param.preprocess_parameters.model_name_or_path,
        writes=coords.tp == 0,
    )


def one_iteration(
    trainer: Trainer, state: Progress, loader, forward_step: Callable, journal: log.Journal, *, careful: bool
) -> Progress:
    """Read, step, report. Returns how far the run has come then."""
    session, plan = trainer.session, trainer.session.plan
    began, rate = time.perf_counter(), schedule_lr.learning_rate(trainer.optimizer)
    step = read_step(session, loader, check=careful or session.position.step % plan.args.check_batches == 0)
    result = train_step(
        session, trainer.chunks, trainer.optimizer, trainer.scheduler, trainer.pieces, step, forward_step
    )
    state = state.after(samples=plan.global_batch_size, skipped=result.skipped)
    if plan.args.check_replicas and state.iteration % plan.args.check_replicas == 0:
        replicas.check_replicas(
            start.replicated(start.named_tensors(trainer.chunks), plan.model),
            session,
            when=f"after step {state.iteration}",
        )
    journal.add(_report(trainer, state, step, result, rate=rate, seconds=time.perf_counter() - began))
    return state


def evaluate(trainer: Trainer, evaluation: Evaluation, forward_step: Callable, journal: log.Journal) -> None:
    """Evaluate the validation split after the current step, and report it."""
    session = trainer.session

    def sums(loader) -> tuple[float, int]:
        step = read_step(session, loader, check=True)
        return evaluate_step(session, trainer.chunks, step.undivided(), forward_step), step.tokens

    loss, tokens = evaluation.run(trainer.chunks, sums)
    journal.add_validation(session.position.step, loss, tokens)


def read_step(session: Session, loader, *, check: bool) -> batches.StepBatches:
    """The micro-batches of one step; `check` compares their sample ids across the model-parallel group."""
    from megatron.core import parallel_state

    session.position.at("reading data")
    step = batches.gather_step(
        loader,
        count=session.plan.num_microbatches,
        loss_type=session.plan.loss_type,
        counts=session.speaks_for_loss,
        device=session.device,
    )
    if check:
        session.position.at("comparing sample ids")
        group = parallel_state.get_model_parallel_group()
        batches.check_same_samples(step.sample_ids, group=group, device=session.device, step=session.position.step)
    return step


def _report(
    trainer: Trainer, state, step: batches.StepBatches, result: StepResult, *, rate: float, seconds: float
) -> log.Iteration:
    plan = trainer.session.plan
    return log.Iteration(
        iteration=state.iteration,
        train_iters=plan.args.train_iters,
        consumed_samples=state.consumed_samples,
        seconds=seconds,
        learning_rate=rate,
        next_learning_rate=schedule_lr.learning_rate(trainer.optimizer),
        global_batch_size=plan.global_batch_size,
        loss=result.loss,
        grad_norm=result.grad_norm,
        tokens=step.all_tokens,
        labelled_tokens=step.tokens,
        skipped=int(result.skipped),
    )


def open_loaders(trainer: Trainer, state: Progress, datasets_provider: Callable):
    """An endless iterator of this rank's micro-batches from the resumed position on, the evaluation that was asked for, and
    `state` on these data."""
    session, args = trainer.session, trainer.session.plan.args
    session.position.at("opening the data")
    needs = frozenset().union(*(start.unwrap(chunk).needs() for chunk in trainer.chunks))
    samples = args.train_iters * session.plan.global_batch_size
    loader, valid, _ = datasets_provider((samples, 0, 0), consumed_samples=state.consumed_samples, needs=needs)
    state, told = state.on(agree.same_data(loader))
    log.say(session.rank, *getattr(loader, "lines", list)(), *told)
    if args.eval_interval is None:
        return iter(loader), None, state
    agree.same_data(valid)
    evaluation = Evaluation.of(
        valid,
        interval=args.eval_interval,
        iters=args.eval_iters,
        num_microbatches=session.plan.num_microbatches,
        option=option,
    )
    log.say(session.rank, *evaluation.lines())
    return iter(loader), evaluation, state


def save(trainer: Trainer, state: Progress) -> None:
    """Save, after a look at the replicas where that was asked for."""
    session, plan = trainer.session, trainer.session.plan
    if plan.args.check_replicas:
        tensors = start.replicated(start.named_tensors(trainer.chunks), plan.model)
        replicas.check_replicas(tensors, session, when=f"before saving iteration {state.iteration}")
    session.position.at("saving")
    checkpoint_save.save(trainer, state)
