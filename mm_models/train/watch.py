"""What a run says when it goes wrong: every rank's stack with its place.

`Watchdog` prints the stacks of all threads of this rank when nothing has moved for nearly the collective timeout, so that
every rank is heard before the first timeout tears the others down. `describe_failure` is the text of a crash.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback

from mm_models.train.session import Place, Position

EARLY = 0.9
"""Fraction of the collective timeout after which a rank that has not moved prints its stack."""


class Watchdog:
    """A thread that watches `place.position`; use as a context manager around training."""

    def __init__(self, place: Place, *, seconds: float):
        self._place, self._seconds = place, seconds * EARLY
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mm-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(1)

    def _watch(self) -> None:
        seen, since = _snapshot(self._place.position), time.monotonic()
        while not self._stop.wait(min(1.0, self._seconds / 4)):
            now = _snapshot(self._place.position)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._seconds:
                self._report(time.monotonic() - since)
                return

    def _report(self, idle: float) -> None:
        write(f"{self._place} has not moved for {idle:.0f} s at {self._place.position}. Its stack:\n")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def _snapshot(position: Position) -> tuple:
    return position.step, position.doing, position.micro_batch, position.chunk


def write(text: str) -> None:
    """To stderr in one system call, so that ranks do not cut each other's lines."""
    sys.stderr.flush()
    os.write(2, text.encode())


def describe_failure(place: Place, error: BaseException) -> str:
    """Rank, place and stack of an exception that ends the run."""
    stack = "".join(traceback.format_exception(error))
    return f"{place} failed at {place.position}:\n{stack}"
