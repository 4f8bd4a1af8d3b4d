"""Runs a test case on n fresh processes joined by gloo, forked from a server that has already imported everything.

    results = run(case, 4, argument, timeout=30)      # case(rank, argument) in each process; results in rank order

Importing torch, megatron-core and transformers costs seconds; forking from a preloaded forkserver costs 0.06 s for four
processes. Each case gets new processes, so no parallel state survives it and a hang dies at its own timeout, with the stack
of every rank on stderr. `case` must be a module-level function, its arguments and result picklable.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

PRELOAD = ["tests.preload"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
if not hasattr(multiprocessing.current_process(), "_inheriting"):  # a case's process imports this too, and may not
    forkserver.ensure_running()  # before the product asks for a server with imports of its own


class CaseFailed(AssertionError):
    """A rank raised, died or did not end in time."""


def run(case: Callable, nprocs: int, *args: Any, timeout: float = 30) -> list[Any]:
    """Run `case(rank, *args)` on `nprocs` processes; the results in rank order. Raises `CaseFailed` with every rank's traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="mm-case-") as folder:
        readers, processes = [], []
        for rank in range(nprocs):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_child,
                args=(case, rank, nprocs, os.path.join(folder, "store"), writer, args, timeout),
                daemon=True,
            )
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            return _collect(readers, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(readers, processes, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout + 5  # each child prints its own stack and exits at `timeout`
    pending = dict(zip(readers, range(len(readers))))
    while pending and not failures:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise CaseFailed(f"ranks {sorted(pending.values())} did not end in {timeout} s")
        _read(ready, pending, processes, results, failures)
    if failures:  # peers of a failed rank often fail too: hear them out briefly, then report all
        _read(wait(list(pending), timeout=1.0) if pending else [], pending, processes, results, failures)
        raise CaseFailed("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(readers))]


def _read(ready, pending, processes, results, failures) -> None:
    for reader in ready:
        rank = pending.pop(reader)
        try:
            ok, value = pickle.loads(reader.recv_bytes())
        except EOFError:
            processes[rank].join(5)
            ok, value = False, f"died with exit code {processes[rank].exitcode}"
        (results if ok else failures)[rank] = value


def _child(case, rank, nprocs, store, writer, args, timeout) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout, exit=True, file=sys.stderr)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(nprocs), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, nprocs), rank=rank, world_size=nprocs)
        answer = (True, case(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))
    writer.close()
    sys.stdout.flush()
    os._exit(0)  # no teardown: gloo would wait for peers that have failed
