"""128 experts, top-8, most of them idle: grouped against loop, alltoall against allgather, two expert ranks against one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mm_models.components.moe import Experts, Router
from mm_models.errors import UserError
from mm_models.fsdp2 import grads, mesh, sharding
from mm_models.fsdp2.experts import MoE
from mm_models.fsdp2.layers import MLP
from mm_models.ops.reference import grouped_matmul, grouped_matmul_loop, silu_mul
from tests.fsdp2 import kit
from tests.harness import run

HIDDEN, EXPERTS, TOP = 64, 128, 8


class Block(nn.Module):
    """A mixture-of-experts block with nothing around it but what sharding wants."""

    tied = None

    def __init__(self, *, grouped: bool, dispatch: str, layout: str, idle: int):
        super().__init__()
        router = Router(hidden=HIDDEN, experts=EXPERTS, top_k=TOP, scale=1.5)
        experts = Experts(
            experts=EXPERTS,
            hidden=HIDDEN,
            intermediate=32,
            layout=layout,
            matmul=grouped_matmul if grouped else grouped_matmul_loop,
        )
        shared = MLP(
            nn.Linear(HIDDEN, 32, bias=False), nn.Linear(HIDDEN, 32, bias=False), nn.Linear(32, HIDDEN, bias=False),
            silu_mul=silu_mul,
        )  # fmt: skip
        self.mlp = MoE(router, experts, shared, dispatch=dispatch)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                values = torch.randn(parameter.shape, generator=generator) * 0.2
                if layout == "stacked" and ".experts." in name:
                    shape = (EXPERTS, parameter.shape[2], parameter.shape[1])
                    values = values.reshape(shape).transpose(1, 2)
                parameter.copy_(values)
            router.e_score_correction_bias[EXPERTS - idle :] = -50.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden)


def tokens(rank: int, count: int) -> torch.Tensor:
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(90 + rank))


def case(rank: int, counts: list[int], idle: int, variants: list[dict]) -> list[dict]:
    """Forward and every gradient of each variant; this rank has `counts[rank]` tokens."""
    found = []
    for variant in variants:
        ep = variant.pop("ep", 1)
        block = Block(**{"grouped": True, "dispatch": "alltoall", "layout": "stacked_hf", "idle": idle} | variant)
        meshes = mesh.make(mesh.Sizes.of(dist.get_world_size(), ep=ep), "cpu")
        sharding.shard(block, meshes, fsdp=["mlp"], ep=["mlp.experts"])
        x = tokens(rank, counts[rank]).requires_grad_()
        out = block(x)
        (out * tokens(rank + 10, counts[rank])).sum().backward()
        grads.fill_missing(block)
        result = {"out": out.detach(), "x": x.grad, **kit.gradients(block)}
        if variant.get("layout") == "stacked":
            result = {n: g.transpose(1, 2) if ".experts." in n else g for n, g in result.items()}
        found.append(result)
    return found


def error(got: dict, expected: dict) -> tuple[float, str]:
    return kit.worst({n: ((got[n] - e).norm() / e.norm().clamp(min=1e-12)).item() for n, e in expected.items()})


@pytest.mark.parametrize("processes,counts", [(1, [40]), (2, [40, 23])])
def test_grouped_equals_loop(processes, counts):
    """At EP 1 and 2, a hundred experts that no token chooses among them; and EP 2 against EP 1 within 1e-6."""
    variants = [{"ep": ep, "grouped": grouped} for ep in range(1, processes + 1) for grouped in (True, False)]
    for rank, results in enumerate(run(case, processes, counts, 100, variants, timeout=60)):
        for grouped, loop in zip(results[::2], results[1::2]):
            assert error(grouped, loop)[0] <= 2.9e-6, (rank, error(grouped, loop))
        idle = results[0]["mlp.experts.gate_up_proj"][EXPERTS - 100 :]
        assert len(idle) == 100 and not idle.any()
        if processes == 2:
            assert error(results[2], results[0])[0] <= 1e-6, (rank, error(results[2], results[0]))


@pytest.mark.parametrize("counts", [[40, 23, 31, 12], [40, 0, 7, 1], [0, 0, 0, 5]], ids=str)
@pytest.mark.parametrize("ep", [2, 4])
def test_dispatchers_are_equal(counts, ep):
    """Also where a rank has no token at all. The forward is equal bit by bit."""
    variants = [{"ep": ep, "dispatch": dispatch} for dispatch in ("alltoall", "allgather")]
    variants.append({"ep": 1})
    for alltoall, allgather, one in run(case, 4, counts, 0, variants, timeout=60):
        assert torch.equal(alltoall["out"], allgather["out"])
        assert error(allgather, alltoall)[0] <= 1e-6 and error(alltoall, one)[0] <= 1e-6


def test_transposed_experts():
    variants = [{"ep": ep, "layout": layout} for ep in (1, 2) for layout in ("stacked_hf", "stacked")]
    for results in run(case, 2, [40, 23], 100, variants, timeout=60):
        for plain, transposed in zip(results[::2], results[1::2]):
            assert error(transposed, plain)[0] <= 1e-6


def test_an_unknown_dispatcher_is_refused():
    block = Block(grouped=True, dispatch="alltoal", layout="stacked_hf", idle=0)
    with pytest.raises(UserError, match="unknown dispatcher 'alltoal'; did you mean 'alltoall'"):
        block(tokens(0, 3))


class Memory:
    """A replay that forces or records."""

    def __init__(self, forced):
        self.forced, self.noted = forced, []

    def chosen(self):
        return self.forced

    def note(self, indices):
        self.noted.append(indices)


def test_a_replayed_choice_is_used_and_noted():
    block = Block(grouped=True, dispatch="alltoall", layout="stacked_hf", idle=0)
    block.mlp.replay = Memory(None)
    free = block(tokens(0, 3))
    (chosen,) = block.mlp.replay.noted
    block.mlp.replay = Memory((chosen + 1) % EXPERTS)
    forced = block(tokens(0, 3))
    assert torch.equal(block.mlp.replay.noted[0], (chosen + 1) % EXPERTS) and not torch.equal(forced, free)
    block.mlp.replay = Memory(chosen)
    assert torch.equal(block(tokens(0, 3)), free)
