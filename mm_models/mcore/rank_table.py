"""The table at the start of a run: what each rank holds and trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mm_models.layout import ModelSplit


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """What one rank holds and trains: one row of the table at start. `trains` counts elements."""

    rank: int
    stage: int
    tp: int
    dp: int
    ep: int
    holds: tuple[str, ...]
    experts: str
    trains: int
    total: int


def holdings(split: ModelSplit, stage: int) -> tuple[str, ...]:
    """One text per virtual chunk: which layers and ends of both modules stand there."""
    found = []
    for chunk in range(split.any.vpp):
        parts = []
        for module, ends in (("vision", ("patches", "projector")), ("text", ("embedding", "head"))):
            part = split.stage(module, stage, chunk)
            if part.first:
                parts.append(ends[0])
            if part.layers:
                parts.append(f"{module} {_span(part.layers)}")
            if part.last:
                parts.append(ends[1])
        found.append(" + ".join(parts) or "nothing")
    return tuple(found)


def _span(layers: Sequence[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def rank_table(rows: Iterable[RankRow]) -> list[str]:
    """The table rank -> stage, chunks, layers, experts, what trains."""
    head = ("rank", "stage", "tp", "dp", "ep", "chunk: holds", "experts", "trains")
    body = [
        (
            *map(str, (row.rank, row.stage, row.tp, row.dp, row.ep)),
            "; ".join(f"{chunk}: {text}" for chunk, text in enumerate(row.holds)),
            row.experts,
            f"{row.trains:,} of {row.total:,}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
