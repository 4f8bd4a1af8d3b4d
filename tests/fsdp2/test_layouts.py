"""Every layout against plain Hugging Face in one process: logits bit by bit, loss, every gradient, norm, clip, one SGD step.

With EP > 1 in fp32 the reference for logits is Hugging Face on the concatenated batch of the expert-parallel group: an fp32 matrix
product's row depends on the number of rows below 12 of them, and experts see the tokens of all ranks (tests/numerics).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mm_models.fsdp2 import grads, sharding
from tests.fsdp2 import kit
from tests.harness import run
from tests.mcore.batches import hf_inputs
from tests.models import tiny_glm_model

KINDS = ("experts.gate_up_proj", "experts.down_proj", "shared_experts", "mlp.gate.", "q_proj", "embed_tokens", "visual.blocks",
         "merger", "lm_head")  # fmt: skip
"""Kinds of parameters whose weight delta must be seen among those that are compared by ratio."""

PREFETCH = {"forward_prefetch": 2, "backward_prefetch": 1}


def unlabelled(data: dict) -> dict:
    return {key: value for key, value in data.items() if key != "labels"}


def forward_case(rank: int, dtype: torch.dtype, layout: dict) -> dict:
    hf = tiny_glm_model(0, dtype)
    policy = kit.BF16 if dtype == torch.bfloat16 else sharding.Policy(**PREFETCH)
    model = kit.assemble(tiny_glm_model(0) if dtype == torch.bfloat16 else hf, policy=policy, **layout)
    data, world, ep = kit.global_batch(), dist.get_world_size(), layout.get("ep", 1)
    equal, dtypes = [], set()
    with torch.no_grad():
        for at, part in enumerate(kit.mine(data)):
            got = model(unlabelled(part))
            dtypes.add(got.dtype)
            first = at * world + rank // ep * ep
            group = data[first : first + ep]
            together = hf(**hf_inputs(kit.joined(group))).logits[rank % ep : rank % ep + 1]
            equal.append(torch.equal(got, together if dtype == torch.float32 else hf(**hf_inputs(part)).logits))
    return {"equal": equal, "dtypes": dtypes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", kit.LAYOUTS)
def test_logits_are_bit_equal(name, dtype):
    """bf16: fp32 masters computing in bf16 against Hugging Face in bf16 with an fp32 router, on the rank's own batch."""
    processes, layout = kit.LAYOUTS[name]
    results = run(forward_case, processes, dtype, layout, timeout=60)
    assert [result["equal"] for result in results] == [[True] * (4 // processes)] * processes
    assert all(result["dtypes"] == {dtype} for result in results)


def step_case(rank: int, layout: dict, options: dict) -> dict:
    hf = tiny_glm_model(0)
    loss, expected, norm = kit.reference(hf, kit.global_batch())
    model = kit.assemble(hf, policy=sharding.Policy(**PREFETCH), **layout, **options)
    total = kit.backward(model, kit.mine(kit.global_batch()))
    dist.all_reduce(total)
    before = {name: kit.whole(p).detach().clone() for name, p in model.named_parameters()}
    errors = kit.relative(kit.gradients(model), expected)
    norms = [grads.norm(model)]
    unclipped = kit.gradients(model)
    grads.clip(model, norms[0], 1e9)
    untouched = all(torch.equal(g, unclipped[name]) for name, g in kit.gradients(model).items())
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=False).step()
    deltas = {name: before[name] - kit.whole(p).detach() for name, p in model.named_parameters()}
    ratios = {name: (deltas[name].norm() / e.norm()).item() for name, e in expected.items() if e.norm() > 1e-3 * norm}
    factor = grads.clip(model, norms[0], 0.1)
    norms.append(grads.norm(model))
    clipped = {name: g / factor for name, g in kit.gradients(model).items()}
    return {
        "loss": abs(total.item() - loss) / loss,
        "gradient": kit.worst(errors),
        "norm": abs(norms[0] - norm) / norm,
        "norms": norms,
        "untouched": untouched,
        "one factor": kit.worst(kit.relative(clipped, expected)),
        "delta": kit.worst(kit.relative(deltas, expected)),
        "ratio": max(((abs(ratio - 1), name) for name, ratio in ratios.items())),
        "seen": sorted(ratios),
    }


def check_step(results: list[dict]) -> None:
    for result in results:
        assert result["norms"] == results[0]["norms"], "the same number on every rank"
        assert result["loss"] < 1e-6
        assert result["gradient"][0] < 1e-4 and result["norm"] < 1e-6, result
        assert result["untouched"] and result["one factor"][0] < 1e-4
        assert abs(result["norms"][1] - 0.1) < 1e-6
        assert result["delta"][0] < 1e-4 and result["ratio"][0] < 1e-4, result
        assert all(any(kind in name for name in result["seen"]) for kind in KINDS)


@pytest.mark.parametrize("name", kit.LAYOUTS)
def test_step_equals_one_process(name):
    """Loss, gradients, norm, clip and the weight deltas of SGD at rate 1, on the same four micro-batches; with fewer ranks they
    are accumulated. Top-2 choices stand on different ranks with EP."""
    processes, layout = kit.LAYOUTS[name]
    check_step(run(step_case, processes, layout, {}, timeout=60))


@pytest.mark.parametrize("name", ["ep2", "ep4", "ep2-fsdp2"])
def test_step_with_the_allgather_dispatcher(name):
    processes, layout = kit.LAYOUTS[name]
    check_step(run(step_case, processes, layout, {"dispatch": "allgather"}, timeout=60))


def test_step_with_the_expert_loop():
    check_step(run(step_case, 2, {"ep": 2}, {"grouped": False}, timeout=60))


def test_step_with_transposed_experts():
    results = run(transposed_case, 4, {"ep": 2}, timeout=60)
    assert all(result["gradient"][0] < 1e-4 and result["norm"] < 1e-6 for result in results), results


def transposed_case(rank: int, layout: dict) -> dict:
    hf = tiny_glm_model(0)
    _, expected, norm = kit.reference(hf, kit.global_batch())
    model = kit.assemble(hf, expert_layout="stacked", **layout)
    kit.backward(model, kit.mine(kit.global_batch()))
    found = {n: g.transpose(1, 2) if ".experts." in n else g for n, g in kit.gradients(model).items()}
    return {"gradient": kit.worst(kit.relative(found, expected)), "norm": abs(grads.norm(model) - norm) / norm}


def degrees_case(rank: int, dispatches: list[str]) -> dict:
    """EP 2 against EP 1 in the same world, on the same global batch, micro-batches in the same places."""
    found = []
    for ep, dispatch in [(1, "alltoall"), *((2, dispatch) for dispatch in dispatches)]:
        model = kit.assemble(tiny_glm_model(0), ep=ep, dispatch=dispatch)
        data = kit.mine(kit.global_batch())
        with torch.no_grad():
            logits = [model(unlabelled(part)) for part in data]
        loss = kit.backward(model, data)
        found.append({"logits": torch.cat(logits), "loss": loss, **kit.gradients(model)})
    one, two, *others = found
    return {
        "degree": kit.worst(kit.relative(two, one)),
        "loss": abs(two["loss"] - one["loss"]).item() / one["loss"].item(),
        "dispatch": [kit.worst(kit.relative(other, two)) for other in others],
        "bits": [torch.equal(other["logits"], two["logits"]) for other in others],
    }


def test_two_expert_ranks_equal_one():
    """The loss within 1e-6; logits and gradients within 2e-6: an fp32 product's row depends on the number of rows (tests/numerics)."""
    for result in run(degrees_case, 2, ["alltoall", "allgather"], timeout=60):
        assert result["loss"] <= 1e-6
        assert result["degree"][0] <= 2e-6, result
        assert result["bits"] == [True] and result["dispatch"][0][0] <= 1e-6, result
