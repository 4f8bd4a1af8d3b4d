"""How an entry script ends: 0 done, 1 failed, 2 a user's mistake, 128 + n stopped by signal n.

A mistake found before the world is joined is every rank's, and printed by rank 0 alone; afterwards each rank speaks for itself.
After a failure the process leaves at once, without teardown: peers of a failed rank would only wait for each other.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import warnings
from collections.abc import Callable

from mm_models.errors import UserError


class StoppedBySignal(Exception):
    """The run saved and ended because of a signal."""

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.number = number


class NonFinite(RuntimeError):
    """Loss or gradient norm is NaN or infinite: going on would destroy the weights."""


def run_script(main: Callable[[], None]) -> int:
    """Call `main`; the exit status. A crash of the interpreter itself prints every thread's stack."""
    faulthandler.enable()
    warnings.filterwarnings(
        "ignore", module=r"megatron\.core"
    )  # it misses TransformerEngine and Apex, which we do not use
    try:
        main()
    except UserError as error:
        _complain(error)
        return _leave(2)
    except StoppedBySignal as stop:
        print(stop, flush=True)
        return _close(128 + stop.number)
    except Exception as error:
        _tell_failure(error)
        return _leave(1)
    return _close(0)


def _complain(error: UserError) -> None:
    if _joined():
        print(f"error (rank {_rank()}): {error}", file=sys.stderr, flush=True)
    elif _rank() == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)


def _tell_failure(error: Exception) -> None:
    if "torch" in sys.modules and _joined():
        from mm_models.train import session, watch

        if session.running():
            watch.write(watch.describe_failure(session.current(), error))
            return
    raise error


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _joined() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _close(status: int) -> int:
    """After a good end all ranks are here: leave the world in order."""
    if _joined():
        sys.modules["torch"].distributed.destroy_process_group()
    return status


def _leave(status: int) -> int:
    """After a failure: at once."""
    if not _joined():
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
