"""What a run prints: Megatron's own iteration line, the configuration at start, and the machine-readable copies.

The iteration line has exactly Megatron's fields in Megatron's order, so that existing parsers read it; like there, the
learning rate in it is the one set for the next step. Full precision goes to `--log-metrics` (one JSON object a line: the
loss that was optimised, the learning rate that was used), scalars to TensorBoard, a progress bar to a terminal only.
Only one rank prints iterations: the last, which has the loss, as in Megatron.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One finished iteration. `seconds` is the mean time of an iteration since the last line; `loss` None when skipped.
    `flops` are those of the whole global batch, forward and backward, None where they are not counted."""

    iteration: int
    train_iters: int
    consumed_samples: int
    seconds: float
    learning_rate: float
    next_learning_rate: float
    global_batch_size: int
    loss: float | None
    grad_norm: float | None
    tokens: int
    labelled_tokens: int
    skipped: int = 0
    nans: int = 0
    flops: float | None = None

    @property
    def tflops_per_second(self) -> float | None:
        """10^12 floating-point operations per second, of all processes together."""
        return self.flops / self.seconds / 1e12 if self.flops and self.seconds else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole global batch, padding included, per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def iteration_line(it: Iteration, now: datetime) -> str:
    """Megatron's line (training.py, `training_log`)."""
    text = f" [{now:%Y-%m-%d %H:%M:%S}]"
    text += f" iteration {it.iteration:8d}/{it.train_iters:8d} |"
    text += f" consumed samples: {it.consumed_samples:12d} |"
    text += f" elapsed time per iteration (ms): {it.seconds * 1000:.1f} |"
    text += f" learning rate: {it.next_learning_rate:.6E} |"
    text += f" global batch size: {it.global_batch_size:5d} |"
    if it.loss is not None:
        text += f" lm loss: {it.loss:.6E} |"
    text += " loss scale: 1.0 |"
    if it.grad_norm is not None:
        text += f" grad norm: {it.grad_norm:.3f} |"
    return text + f" number of skipped iterations: {it.skipped:3d} | number of nan iterations: {it.nans:3d} |"


def validation_line(iteration: int, loss: float) -> str:
    """Megatron's line (training.py, `evaluate_and_print_results`)."""
    perplexity = math.exp(min(20, loss))
    return f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"


class Journal:
    """Where iterations are reported. Silent on every rank but one."""

    def __init__(
        self, *, speaks: bool, interval: int, train_iters: int, start: int, metrics: str | None, tensorboard: str | None
    ):
        self.speaks, self._interval, self._done = speaks, interval, start
        self._seconds, self._count, self._skipped = 0.0, 0, 0
        self._all_tokens, self._all_flops, self._all_seconds = 0, 0.0, 0.0
        self._metrics = open_metrics(metrics, start) if speaks and metrics else None
        self._board = _board(tensorboard) if speaks and tensorboard else None
        self._progress = _progress(train_iters, start) if speaks and sys.stdout.isatty() else None

    def add(self, it: Iteration) -> None:
        """Report an iteration; its line comes every `--log-interval` iterations and averages the time in between."""
        self._all_tokens, self._all_seconds = self._all_tokens + it.tokens, self._all_seconds + it.seconds
        self._all_flops += it.flops or 0.0
        if not self.speaks:
            return
        if self._metrics:
            speeds = {"tokens_per_second": it.tokens_per_second, "tflops_per_second": it.tflops_per_second}
            record = asdict(it) | speeds
            self._write(record)
        if self._board:
            self._scalars(it)
        self._seconds, self._count, self._skipped = (
            self._seconds + it.seconds,
            self._count + 1,
            self._skipped + it.skipped,
        )
        if it.iteration % self._interval == 0:
            shown = Iteration(**(asdict(it) | {"seconds": self._seconds / self._count, "skipped": self._skipped}))
            self._print(iteration_line(shown, datetime.now()))
            self._seconds, self._count, self._skipped = 0.0, 0, 0
        if self._progress:
            bar, task = self._progress
            bar.update(task, completed=it.iteration, speed=f"{it.tokens_per_second:,.0f} tokens/s")

    def add_validation(self, iteration: int, loss: float, tokens: int) -> None:
        """Report the validation loss after an iteration, over `tokens` trained tokens. A line of its own in the metrics file."""
        if not self.speaks:
            return
        if self._metrics:
            self._write({"iteration": iteration, "validation_loss": loss, "validation_tokens": tokens})
        if self._board:
            self._board.add_scalar("lm loss validation", loss, iteration)
        self._print(validation_line(iteration, loss))

    @property
    def tokens_per_second(self) -> float:
        """The mean since the start, on every rank."""
        return self._all_tokens / self._all_seconds if self._all_seconds else 0.0

    def closing_line(self, *, iteration: int, train_iters: int, consumed_samples: int) -> str:
        """What a run ends with: how far it came and the mean speed since its start. The same on every rank."""
        text = f"training ended at iteration {iteration} of {train_iters}, {consumed_samples} samples consumed, "
        text += f"{self.tokens_per_second:,.0f} tokens/s"
        return text + (f", {self._all_flops / self._all_seconds / 1e12:.3g} TFLOP/s" if self._all_flops else "")

    def _write(self, record: Mapping[str, object]) -> None:
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()

    def _print(self, line: str) -> None:
        if self._progress:
            self._progress[0].console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def _scalars(self, it: Iteration) -> None:
        values = {
            "learning-rate": it.learning_rate,
            "iteration-time": it.seconds,
            "tokens-per-second": it.tokens_per_second,
            "tflops-per-second": it.tflops_per_second,
        }
        values |= {
            "lm loss": it.loss,
            "grad-norm": it.grad_norm,
            "labelled-tokens": it.labelled_tokens,
            "batch-size": it.global_batch_size,
        }
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, it.iteration)

    def close(self) -> None:
        for sink in (self._metrics, self._board):
            if sink:
                sink.close()
        if self._progress:
            self._progress[0].stop()


def open_metrics(path: str, start: int):
    """The metrics file, open to append after iteration `start`: lines of a broken run beyond it are dropped."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if start and file.exists():
        kept = [
            line
            for line in file.read_text().splitlines()
            if line.endswith("}") and json.loads(line)["iteration"] <= start
        ]
    file.write_text("".join(line + "\n" for line in kept))
    return file.open("a")


def read_metrics(path: str | Path) -> list[dict]:
    """The records of a metrics file, in order."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _board(folder: str):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def _progress(total: int, start: int):
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    bar.start()
    return bar, bar.add_task("training", total=total, completed=start, speed="")


def say(rank: int, *lines: str) -> None:
    """Print on rank 0."""
    if rank == 0:
        print(*lines, sep="\n", flush=True)


def decay_lines(weight_decay: float, decayed: int, exempt: Sequence[str]) -> list[str]:
    """Which trained parameters have no weight decay; names that differ in an index alone share a line."""
    if not weight_decay:
        return ["weight decay 0"]
    counts: dict[str, int] = {}
    for name in exempt:
        pattern = re.sub(r"\.\d+\.", ".{*}.", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    shown = (f"  {name}" + (f" ({count})" if count > 1 else "") for name, count in counts.items())
    return [f"weight decay {weight_decay}: {decayed} parameters; none on {len(exempt)} biases and vectors:", *shown]


def configuration_lines(settings: Mapping[str, object], title: str) -> list[str]:
    """The resolved configuration, one `name .... value` a line, sorted, as Megatron prints its arguments."""
    rows = [f"  {name} {'.' * max(3, 46 - len(name))} {settings[name]}" for name in sorted(settings)]
    return [
        f"------------------------ {title} ------------------------",
        *rows,
        f"-------------------- end of {title} ---------------------",
    ]
