"""When a run leaves its loop, and what it says then."""

from __future__ import annotations

import signal

from mm_models.train import log
from mm_models.train.entry import StoppedBySignal
from mm_models.train.progress import Progress


def leaving(iteration: int, *, stop: int | None, train_iters: int, exit_interval: int | None) -> bool:
    """Whether `iteration` is the run's last: a signal was agreed on, all is done, or it was asked to leave here."""
    return stop is not None or iteration == train_iters or bool(exit_interval and iteration % exit_interval == 0)


def end(journal: log.Journal, state: Progress, *, stop: int | None, saved: str, rank: int, train_iters: int) -> None:
    """Close the journal and say how the run ended; `StoppedBySignal` with `saved` (where its last state is) after a signal."""
    journal.close()
    if stop is not None:
        name = signal.Signals(stop).name
        raise StoppedBySignal(stop, f"stopped by {name} after iteration {state.iteration}, {saved}")
    log.say(
        rank,
        journal.closing_line(
            iteration=state.iteration, train_iters=train_iters, consumed_samples=state.consumed_samples
        ),
    )
