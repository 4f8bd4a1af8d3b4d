"""Mixture of experts: router, grouped experts, and the path a token takes between them.

router -> (dispatch over the expert-parallel group) -> grouped experts -> (back) -> times the routing weight in fp32 -> sum over the
token's experts in top-k order -> cast. The shared expert is added by the caller, after the cast. This is Hugging Face's
`grouped_mm` arithmetic; in bf16 and on any expert parallel degree the result is the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mm_models.components.exchange import Exchange, gather_rows, reduce_rows
from mm_models.ops.reference import grouped_matmul, swiglu


class Router(nn.Module):
    """Sigmoid router with a correction bias for the choice alone, group-limited top-k, normalisation and scaling. All fp32.

    `weight` (E, H) and `e_score_correction_bias` (E,) are fp32 whatever the model's dtype (DeepSeek-V3, §2.1.2).
    """

    def __init__(
        self,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        groups: int = 1,
        top_groups: int = 1,
        normalise: bool = True,
        scale: float = 1.0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32))
        self.top_k, self.groups, self.top_groups = top_k, groups, top_groups
        self.normalise, self.scale = normalise, scale

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, H) -> weights (T, k) fp32 and expert indices (T, k). `chosen` replays indices of an earlier forward (recompute)."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        indices = self._choose(scores.detach()) if chosen is None else chosen
        weights = scores.gather(1, indices)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale, indices

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        choice = scores + self.e_score_correction_bias
        if self.groups > 1:
            per_group = choice.view(len(choice), self.groups, -1)
            best = per_group.topk(2, dim=-1)[0].sum(dim=-1).topk(self.top_groups, dim=-1, sorted=False)[1]
            kept = torch.zeros_like(per_group[..., 0], dtype=torch.bool).scatter_(1, best, True)
            choice = per_group.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
        return choice.topk(self.top_k, dim=-1, sorted=False)[1]


class Experts(nn.Module):
    """Stacked experts of one rank: `gate_up_proj` (E, 2I, H) as [gate; up], `down_proj` (E, H, I), Hugging Face's own layout.

    `matmul` is a grouped matrix product, or the loop of products it is tested against (`ops.reference`).
    """

    def __init__(
        self,
        *,
        experts: int,
        hidden: int,
        intermediate: int,
        matmul: Callable = grouped_matmul,
        activation: Callable = swiglu,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate, dtype=dtype))
        self.matmul, self.activation = matmul, activation

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(M, H) sorted by expert with `counts` (E,) rows each -> (M, H)."""
        offsets = counts.cumsum(0).to(torch.int32)
        return self.matmul(self.activation(self.matmul(rows, self.gate_up_proj, offsets)), self.down_proj, offsets)


def routed_experts(
    x: torch.Tensor,
    router: Router,
    experts: Experts,
    *,
    ep_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) -> the weighted sum of each token's experts (T, H), and the chosen indices (T, k).

    Global expert e lives on rank `e // local experts` of `ep_group`; the ranks of `etp_group` each hold a slice of every local
    expert's inner width and different tokens. None, or a group of one, means no such split. A rank may get no token at all.
    """
    weights, indices = router(x, chosen)
    top_k, num_experts = indices.shape[1], router.weight.shape[0]
    flat = indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
    rows = _through_experts(rows, counts, experts, ep_group, etp_group)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = rows.index_select(0, back).view(len(x), top_k, x.shape[1])
    return (rows * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype), indices


def _through_experts(rows, counts, experts: Experts, ep_group, etp_group) -> torch.Tensor:
    """(M, H) sorted by global expert, `counts` (all experts,) -> (M, H) in the same order, through whichever ranks hold them."""
    if _size(ep_group) > 1:
        exchange = Exchange.of_counts(counts, ep_group)
        arrived = exchange.send(rows)
        arrived, regroup = _sort_blocks(arrived, exchange.received)
        out = _over_etp(arrived, exchange.received.sum(0), experts, etp_group)
        return exchange.back(out.index_select(0, regroup))
    return _over_etp(rows, counts, experts, etp_group)


def _over_etp(rows, counts, experts: Experts, etp_group) -> torch.Tensor:
    """All ranks of `etp_group` compute all of the group's rows with their slice; each gets back the sum for its own rows."""
    if _size(etp_group) == 1:
        return experts(rows, counts)
    gathered, lengths, all_counts = gather_rows(rows, counts, etp_group)
    gathered, regroup = _sort_blocks(gathered, all_counts)
    out = experts(gathered, all_counts.sum(0)).index_select(0, regroup)
    return reduce_rows(out, lengths, etp_group)


def _sort_blocks(rows: torch.Tensor, block_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that arrive as blocks (source, expert), `block_counts` (sources, experts), sorted by expert; and the index that undoes it."""
    sources, num = block_counts.shape
    expert = torch.arange(num, device=rows.device).repeat(sources).repeat_interleave(block_counts.reshape(-1))
    order = torch.argsort(expert, stable=True)
    undo = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows.index_select(0, order), undo


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
