"""A progress bar on the terminal. Imported only when standard error is one."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


def progress_bar(total: int) -> Callable[[int], None]:
    """Start a bar over `total` bytes; returns what is told the bytes done. It goes away with the last of them."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total)
    bar.start()
    left = total

    def advance(done: int) -> None:
        nonlocal left
        bar.advance(task, done)
        left -= done
        if left <= 0:
            bar.stop()

    return advance
