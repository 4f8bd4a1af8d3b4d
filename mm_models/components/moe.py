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
from torch.distributed.tensor import DTensor

from mm_models.components.exchange import Exchange, exchange_rows, gather_rows, gather_tokens, reduce_rows
from mm_models.errors import unknown_name
from mm_models.ops.reference import grouped_matmul, swiglu

LAYOUTS = ("stacked_hf", "stacked")
"""How stacked experts lie in memory: (E, out, in), Hugging Face's own, or (E, in, out)."""

DISPATCHERS = ("alltoall", "allgather")
"""How tokens reach the ranks that hold their experts."""


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
        self.num_experts, self.top_k, self.groups, self.top_groups = experts, top_k, groups, top_groups
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
    """Stacked experts: `gate_up_proj` (E, 2I, H) as [gate; up], `down_proj` (E, H, I), Hugging Face's own layout; or with
    layout `stacked` transposed, (E, H, 2I) and (E, I, H).

    `matmul` is a grouped matrix product, or the loop of products it is tested against (`ops.reference`). A parameter may be a
    DTensor split over the ranks of an expert-parallel group; this rank's experts are used.
    """

    def __init__(
        self,
        *,
        experts: int,
        hidden: int,
        intermediate: int,
        layout: str = "stacked_hf",
        matmul: Callable = grouped_matmul,
        activation: Callable = swiglu,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if layout not in LAYOUTS:
            raise unknown_name("expert layout", layout, LAYOUTS)
        self.layout, self.matmul, self.activation = layout, matmul, activation
        up, down = (2 * intermediate, hidden), (hidden, intermediate)
        if layout == "stacked":
            up, down = up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(torch.empty(experts, *up, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, *down, dtype=dtype))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(M, H) sorted by expert with `counts` (experts of this rank,) rows each -> (M, H)."""
        offsets = counts.cumsum(0).to(torch.int32)
        gate_up, down = self._matrices(self.gate_up_proj), self._matrices(self.down_proj)
        return self.matmul(self.activation(self.matmul(rows, gate_up, offsets)), down, offsets)

    def _matrices(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's matrices as (experts, out, in)."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local if self.layout == "stacked_hf" else local.transpose(-2, -1)


def routed_experts(
    x: torch.Tensor,
    router: Router,
    experts: Experts,
    *,
    ep_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) -> the weighted sum of each token's experts (T, H), and the chosen indices (T, k)."""
    weights, indices = router(x, chosen)
    out = through_experts(
        hidden=x,
        indices=indices,
        weights=weights,
        experts=experts,
        num_experts=router.num_experts,
        ep_group=ep_group,
        etp_group=etp_group,
    )
    return out, indices


def through_experts(
    *,
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    num_experts: int,
    ep_group: dist.ProcessGroup | None = None,
    etp_group: dist.ProcessGroup | None = None,
    dispatch: str = "alltoall",
) -> torch.Tensor:
    """(T, H), chosen experts (T, k) and their weights (T, k) fp32 -> the weighted sum (T, H).

    Global expert e lives on rank `e // local experts` of `ep_group`; the ranks of `etp_group` each hold a slice of every local
    expert's inner width and different tokens. None, or a group of one, means no such split. A rank may get no token at all.
    `dispatch`: "alltoall" sends each rank the rows of its experts, "allgather" all tokens to all ranks; equal bit by bit.
    `allgather` knows no `etp_group`.
    """
    if dispatch not in DISPATCHERS:
        raise unknown_name("dispatcher", dispatch, DISPATCHERS)
    top_k = indices.shape[1]
    if dispatch == "allgather" and _size(ep_group) > 1:
        assert _size(etp_group) == 1, "the allgather dispatcher does not split experts"
        rows = _all_tokens(hidden, indices, experts, num_experts, ep_group)
    else:
        flat = indices.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        rows = hidden.index_select(0, order.div(top_k, rounding_mode="floor"))
        rows = _through_experts(rows, counts, experts, ep_group, etp_group).index_select(0, _inverse(order))
    rows = rows.view(len(hidden), top_k, hidden.shape[1])
    return (rows * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


def _all_tokens(hidden, indices, experts: Experts, num_experts: int, group: dist.ProcessGroup) -> torch.Tensor:
    """(T, H) -> (T * k, H) in the order of `indices`: every rank sees every token and computes the rows of its own experts.

    Only finished rows travel back, each to its token's rank, so that the sum over a token's experts keeps its order.
    """
    top_k, per_rank, here = indices.shape[1], num_experts // group.size(), dist.get_rank(group)
    tokens, all_indices, lengths = gather_tokens(hidden, indices, group)
    flat = all_indices.reshape(-1)
    mine = (flat.div(per_rank, rounding_mode="floor") == here).nonzero().squeeze(1)
    local = flat.index_select(0, mine) - here * per_rank
    order = torch.argsort(local, stable=True)
    rows = tokens.index_select(0, mine.div(top_k, rounding_mode="floor").index_select(0, order))
    out = experts(rows, torch.bincount(local, minlength=per_rank)).index_select(0, _inverse(order))
    source = torch.arange(len(lengths), device=flat.device).repeat_interleave(
        torch.tensor(lengths, device=flat.device) * top_k
    )
    to = torch.bincount(source.index_select(0, mine), minlength=len(lengths)).tolist()
    own = indices.reshape(-1).div(per_rank, rounding_mode="floor")
    back = exchange_rows(out, to, torch.bincount(own, minlength=len(lengths)).tolist(), group)
    return back.index_select(0, _inverse(torch.argsort(own, stable=True)))


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
    return rows.index_select(0, order), _inverse(order)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
