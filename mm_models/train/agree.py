"""What all ranks must agree on: an answer of rank 0, a fault of any rank, their data, a value that is not finite.

A rank that fails alone would leave the others waiting; here all of them raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mm_models.data.rows import ranges
from mm_models.errors import UserError
from mm_models.train.entry import NonFinite
from mm_models.weights import mmfolder


def from_rank_zero(call: Callable[[], Any], *, doing: str) -> Any:
    """The result of `call` on rank 0, on every rank; a `UserError` or `OSError` there is raised everywhere. Collective."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [(True, call())]
        except (UserError, OSError) as error:
            answer = [(False, str(error))]
    dist.broadcast_object_list(answer, src=0)
    ok, value = answer[0]
    if not ok:
        raise UserError(f"{doing}: {value}")
    return value


def everywhere(call: Callable[[], Any], *, doing: str) -> Any:
    """The result of `call` on this rank; a `UserError` or `OSError` of any rank is raised on all, each once. Collective."""
    result, fault = None, None
    try:
        result = call()
    except (UserError, OSError) as error:
        fault = str(error)
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, fault)
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(found):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        parts = [
            text if len(ranks) == len(found) else f"rank {', '.join(map(str, ranks))}: {text}"
            for text, ranks in by_text.items()
        ]
        raise UserError(f"{doing}: {'; '.join(parts)}")
    return result


def same_data(loader: Any) -> str | None:
    """Refuse ranks whose files or images gave different samples: their orders would not fit together. Collective.

    `loader` is one of `build_loader`, or a plugin's, which need not say what it holds. Returns what it says.
    """
    mine = loader.summary() if hasattr(loader, "summary") else None
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    by_text: dict[str | None, list[int]] = {}
    for rank, text in enumerate(found):
        by_text.setdefault(text, []).append(rank)
    if len(by_text) > 1:
        lines = "; ".join(f"rank {ranges(ranks)}: {text}" for text, ranks in by_text.items())
        raise UserError(
            f"the ranks hold different data ({lines}). Data files and images must be the same on every node: copy them "
            "anew, or name one cache_dir that all nodes see."
        )
    return mine


def refuse_unwritten(tmp: Path, iteration: int, faults: Sequence[str]) -> None:
    """Give up the temporary checkpoint folder `tmp` when a rank could not write its part. For rank 0, within `from_rank_zero`."""
    if faults:
        mmfolder.abandon(tmp)
        raise UserError(
            f"{tmp}: iteration {iteration} could not be written, the one before stays: {'; '.join(faults)}."
        )


def stop_non_finite(step: int, *, loss: float, norm: float, names: Sequence[str], rate: str) -> None:
    """Raise `NonFinite` on every rank, with the parameters (`names`: this rank's) whose gradients are not finite, by rank.

    `rate` is how the user calls the learning rate. Collective over the world.
    """
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(names))
    where = "; ".join(
        f"rank {rank}: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}" for rank, bad in enumerate(found) if bad
    )
    raise NonFinite(
        f"step {step}: loss {loss}, gradient norm {norm}: not finite, stopped before the weights were touched. "
        f"Non-finite gradients on {where or 'no rank'}. Resume from the last checkpoint with a lower {rate} or other data."
    )
