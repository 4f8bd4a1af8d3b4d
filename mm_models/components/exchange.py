"""Rows between the ranks of a group, with gradients: the one all-to-all that expert parallelism needs, and what is built of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all along dim 0; the gradient takes the way back."""

    @staticmethod
    def forward(ctx, rows, send: list[int], receive: list[int], group):
        ctx.splits = (send, receive, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        send, receive, group = ctx.splits
        return _all_to_all(grad, receive, send, group), None, None, None


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group) -> torch.Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def exchange_rows(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """`send[r]` rows to each rank r, in order -> the rows of all ranks, `receive[r]` from each. With gradients."""
    return _AllToAll.apply(rows, send, receive, group)


def gather_tokens(
    hidden: torch.Tensor, indices: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Every rank's tokens (T, H) and chosen experts (T, k) in rank order, and how many tokens each rank has."""
    ranks = group.size()
    lengths = indices.new_empty(ranks)
    dist.all_gather_into_tensor(lengths, indices.new_tensor([len(hidden)]), group=group)
    lengths = lengths.tolist()
    send = [len(hidden)] * ranks
    tokens = exchange_rows(hidden.repeat(ranks, 1), send, lengths, group)
    return tokens, _all_to_all(indices.repeat(ranks, 1), send, lengths, group), lengths


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Who sends how many rows to whom in one dispatch, and the way back.

    `received` (ranks, local experts): how many rows of each local expert came from each rank.
    """

    group: dist.ProcessGroup
    sent: list[int]
    got: list[int]
    received: torch.Tensor

    @classmethod
    def of_counts(cls, counts: torch.Tensor, group: dist.ProcessGroup) -> Exchange:
        """From `counts` (all experts,), the rows this rank has for each global expert."""
        counts = counts.view(group.size(), -1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=group)
        return cls(group=group, sent=counts.sum(1).tolist(), got=received.sum(1).tolist(), received=received)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows sorted by global expert -> the rows for this rank's experts, as blocks (source rank, local expert)."""
        return _AllToAll.apply(rows, self.sent, self.got, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return _AllToAll.apply(rows, self.got, self.sent, self.group)


def gather_rows(
    rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Every rank's rows in rank order, the number of rows of each rank, and every rank's `counts` (ranks, experts)."""
    ranks = group.size()
    all_counts = counts.new_empty(ranks * len(counts))
    dist.all_gather_into_tensor(all_counts, counts.contiguous(), group=group)
    all_counts = all_counts.view(ranks, -1)
    lengths = all_counts.sum(1).tolist()
    return _AllToAll.apply(rows.repeat(ranks, 1), [len(rows)] * ranks, lengths, group), lengths, all_counts


def reduce_rows(rows: torch.Tensor, lengths: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of `gather_rows`: each rank gets the sum over ranks, in rank order, of the rows it owns."""
    own = lengths[dist.get_rank(group)]
    parts = _AllToAll.apply(rows, lengths, [own] * group.size(), group)
    return parts.view(group.size(), own, rows.shape[1]).sum(0)
