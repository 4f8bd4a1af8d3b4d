"""Work shared out to processes, results in order.

Processes come from a forkserver (see `fresh`): they are never forked from a process that runs threads of a tokenizer, of
torch or of a device. Each has a pipe of its own and no thread, so that its death is seen at once, and it ends by itself when the main
process dies. Memory is bounded: a task is handed out only while few results wait for an earlier one.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from mm_models.data.fresh import forkserver
from mm_models.errors import UserError
from mm_models.registry import load_plugins, loaded_plugins

AHEAD = 3
"""Tasks handed out per process beyond the first result not yet there."""


def ordered(
    tasks: Sequence[Any], *, processes: int, start: Callable[..., Callable[[Any], Any]], arguments: tuple, keys: str
) -> Iterator[Any]:
    """`start(*arguments)(task)` for each task, in order. `start` is called once in each process, and must be a
    module-level function; `keys` are the settings named when a process dies.

    A UserError of `start` or of a task is raised here; any other error as RuntimeError with its traceback.
    """
    workers = [_Worker(start, arguments) for _ in range(min(processes, len(tasks)))]
    results: dict[int, Any] = {}
    handed = returned = 0
    try:
        while returned < len(tasks):
            for worker in workers:
                if worker.task is None and handed < min(len(tasks), returned + AHEAD * len(workers)):
                    worker.give(handed, tasks[handed])
                    handed += 1
            busy = {worker.pipe: worker for worker in workers if worker.task is not None}
            for pipe in wait(list(busy)):
                task, result = busy[pipe].take(tasks, keys)
                results[task] = result
            while returned in results:
                yield results.pop(returned)
                returned += 1
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    def __init__(self, start: Callable, arguments: tuple):
        context = forkserver()
        self.pipe, theirs = context.Pipe()
        self.task: int | None = None
        self._process = context.Process(target=_serve, args=(theirs, start, arguments, loaded_plugins()), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, number: int, task: Any) -> None:
        self.task = number
        try:
            self.pipe.send(task)
        except OSError:  # it died before; `take` says so
            return

    def take(self, tasks: Sequence[Any], keys: str) -> tuple[int, Any]:
        number, self.task = self.task, None
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(10)
            raise UserError(
                f"a worker process ({self._process.pid}) {_ending(self._process.exitcode)} at task {number} of "
                f"{len(tasks)}, {tasks[number]}. When memory ran out, lower {keys}."
            ) from error
        if kind == "refused":
            raise UserError(value)
        if kind == "failed":
            raise RuntimeError(f"a worker process failed at {tasks[number]}:\n{value}")
        return number, value

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _serve(pipe: Connection, start: Callable, arguments: tuple, plugins: list[str]) -> None:
    """The life of a worker: one task after the other until the main process closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process is one core
    work = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if work is None:
                load_plugins(plugins)
                work = start(*arguments)
            answer = "done", work(task)
        except UserError as error:
            answer = "refused", str(error)
        except Exception:
            answer = "failed", traceback.format_exc()
        pipe.send(answer)
