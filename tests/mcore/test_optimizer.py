"""Optimizer state through our accessor: complete, right, the same format at any DP, and good for an exact resume."""

from __future__ import annotations

import pytest
import torch

from mm_models.errors import UserError
from mm_models.mcore import optimizer as opt
from tests.harness import run
from tests.mcore import standin

TRAINED = {"weight", "bias", "norm", "router", "experts"}


def _reference(steps: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Plain AdamW in one process: name -> (parameter, exp_avg, exp_avg_sq)."""
    network = standin.Network(torch.float32)
    decayed = [network.weight, network.router, network.experts]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": [network.bias, network.norm], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.01, fused=True)
    for number in range(steps):
        adam.zero_grad()
        network(standin.batch(number)).backward()
        adam.step()
    return {
        name: (p.detach(), adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"])
        for name, p in network.named_parameters()
    }


def _build(flags, *, dtype=torch.float32, ep=1, frozen=()):
    standin.start(ep)
    from megatron.core import parallel_state

    args = standin.arguments(*flags)
    network = standin.Network(dtype, ep=ep, ep_rank=parallel_state.get_expert_model_parallel_rank())
    for name in frozen:
        getattr(network, name).requires_grad_(False)
    chunk = standin.wrap(network, args)
    optimizer = opt.build(args, [chunk])
    for group in optimizer.param_groups:  # what the scheduler does every step
        group["weight_decay"] = args.weight_decay * group["wd_mult"]
    return chunk, optimizer


def _train(rank, flags, dtype, ep, steps, dp):
    chunk, optimizer = _build(flags, dtype=dtype, ep=ep)
    for number in range(steps):
        standin.step(chunk, optimizer, number, rank, dp)
    state = opt.export_state(opt.shards(optimizer, [chunk]))
    named = {name.removeprefix("module."): p.detach().clone() for name, p in chunk.named_parameters()}
    return state, named


def _assemble(states: list[dict], key: str) -> dict[str, torch.Tensor]:
    """Whole tensors from the ranges of all ranks; every element written exactly once."""
    whole, count = {}, {}
    for state in states:
        for name, entry in state["params"].items():
            flat = whole.setdefault(name, torch.zeros(entry["shape"]).view(-1))
            hits = count.setdefault(name, torch.zeros_like(flat))
            low, high = entry["range"]
            flat[low:high] += entry[key]
            hits[low:high] += 1
    assert all((hits == 1).all() for hits in count.values()), count
    return whole


@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",)], ids=["plain", "distributed"])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_state_is_complete_and_equals_plain_adamw(flags, dp):
    results = run(_train, dp, flags, torch.float32, 1, 3, dp)
    states = [state for state, _ in results]
    if not flags:
        states = states[:1]  # every rank holds everything; one of them writes
    reference = _reference(3)
    assert {state["step"] for state in states if state["params"]} == {3}
    for place, key in enumerate(("master", "exp_avg", "exp_avg_sq")):
        whole = _assemble(states, key)
        assert whole.keys() == TRAINED
        for name, value in whole.items():
            torch.testing.assert_close(
                value, reference[name][place].reshape(-1), rtol=2e-5, atol=1e-7, msg=f"{key} of {name}"
            )


@pytest.mark.parametrize(
    "flags", [("--bf16",), ("--bf16", "--use-distributed-optimizer")], ids=["plain", "distributed"]
)
@pytest.mark.parametrize("dp", [1, 2])
def test_fp32_router_in_a_bf16_model_keeps_its_own_state(flags, dp):
    results = run(_train, dp, flags, torch.bfloat16, 1, 2, dp)
    states = [state for state, _ in results][: None if len(flags) == 2 else 1]
    master, named = _assemble(states, "master"), results[0][1]
    for name, value in master.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.to(named[name].dtype), named[name].reshape(-1)), name
    assert named["router"].dtype == torch.float32 and named["weight"].dtype == torch.bfloat16


def _train_saving(rank, flags, steps, more, saved_flags, saved):
    """Train, or take `saved` into a fresh optimizer, then train on; the parameters at the end."""
    chunk, optimizer = _build(flags)
    if saved is not None:
        weights, states = saved
        with torch.no_grad():
            for name, parameter in chunk.named_parameters():
                parameter.copy_(weights[name.removeprefix("module.")])
        optimizer.reload_model_params()
        pieces = opt.shards(optimizer, [chunk])
        opt.import_state(
            pieces, [(f"optim_dp{i:03d}.pt", state) for i, state in enumerate(states)], trainable=TRAINED, where="test"
        )
    dp = torch.distributed.get_world_size()
    for number in range(steps, more):
        standin.step(chunk, optimizer, number, rank, dp)
    named = {name.removeprefix("module."): p.detach().clone() for name, p in chunk.named_parameters()}
    return named, opt.export_state(opt.shards(optimizer, [chunk]))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("flags", [(), ("--use-distributed-optimizer",)], ids=["plain", "distributed"])
def test_reload_continues_bit_equal(flags, dp):
    whole = run(_train_saving, dp, flags, 0, 5, flags, None)
    half = run(_train_saving, dp, flags, 0, 3, flags, None)
    states = [state for _, state in half][: None if flags else 1]
    resumed = run(_train_saving, dp, flags, 3, 5, flags, (half[0][0], states))
    for name, value in whole[0][0].items():
        assert torch.equal(value, resumed[0][0][name]), name


DISTRIBUTED = ("--use-distributed-optimizer",)


@pytest.mark.parametrize(
    "before, after",
    [
        ((2, DISTRIBUTED), (1, ())),
        ((1, ()), (2, DISTRIBUTED)),
        ((3, DISTRIBUTED), (2, DISTRIBUTED)),
        ((2, ()), (2, DISTRIBUTED)),
    ],
)
def test_one_format_at_any_dp_and_with_either_optimizer(before, after):
    (dp, flags), (dp2, flags2) = before, after
    half = run(_train_saving, dp, flags, 0, 3, flags, None)
    states = [state for _, state in half][: None if flags else 1]
    resumed = run(_train_saving, dp2, flags2, 3, 5, flags, (half[0][0], states))
    reference = _reference(5)
    for name, value in resumed[0][0].items():
        torch.testing.assert_close(value, reference[name][0], rtol=2e-5, atol=1e-6, msg=name)


def test_experts_are_reduced_over_their_own_ranks():
    results = run(_train, 2, DISTRIBUTED, torch.float32, 2, 1, 2)
    for state, _ in results:
        entry = state["params"]["experts"]
        assert entry["range"] == (0, 2 * 3 * standin.SIZE) and entry["shape"] == (2, 3, standin.SIZE)


def _faulty_import(rank, change):
    chunk, optimizer = _build(())
    standin.step(chunk, optimizer, 0, 0, 1)
    pieces = opt.shards(optimizer, [chunk])
    state = opt.export_state(pieces)
    change(state)
    try:
        opt.import_state(pieces, [("iter/optim_dp000.pt", state)], trainable=TRAINED, where="iter")
    except UserError as error:
        return str(error)


def _drop(state):
    del state["params"]["norm"]


def _add(state):
    state["params"]["ghost"] = state["params"]["norm"]


def _halve(state):
    entry = state["params"]["weight"]
    entry["range"] = (0, 18)
    for key in ("master", "exp_avg", "exp_avg_sq"):
        entry[key] = entry[key][:18]


def _reshape(state):
    state["params"]["weight"]["shape"] = (4, 9)


def _lie(state):
    state["params"]["weight"]["range"] = (0, 18)


@pytest.mark.parametrize(
    "change, words",
    [
        (_drop, ["Missing: norm (0 of 6 elements)", "--no-load-optim"]),
        (_add, ["Saved but not trained here: ghost"]),
        (_halve, ["Missing: weight (18 of 36 elements)"]),
        (_reshape, ["weight has shape (4, 9), this run's is (6, 6)"]),
        (_lie, ["weight claims range (0, 18)"]),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(change, words):
    (message,) = run(_faulty_import, 1, change)
    assert message is not None and all(word in message for word in words), message


def _frozen_on(rank, frozen_ranks, flags):
    frozen = sorted(TRAINED) if rank in frozen_ranks else ()
    try:
        chunk, optimizer = _build(flags, frozen=frozen)
    except UserError as error:
        return str(error)
    pieces = opt.shards(optimizer, [chunk])
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()
    return [piece.name for piece in pieces], opt.export_state(pieces)["params"].keys() == {p.name for p in pieces}


@pytest.mark.parametrize("flags", [(), ("--bf16",)])
def test_a_rank_with_nothing_to_train_survives(flags):
    # Two ranks that share no reduction: the second stands for a pipeline stage whose part is frozen.
    results = run(_frozen_on, 1, [], flags)
    assert results[0][0] == ["weight", "bias", "norm", "router", "experts"]


def test_all_frozen_is_refused():
    (message,) = run(_frozen_on, 1, [0], ())
    assert "every parameter is frozen" in message and "freeze" in message


def _decay(rank):
    chunk, optimizer = _build(())
    return opt.no_decay(opt.shards(optimizer, [chunk]), optimizer)


def test_biases_and_vectors_have_no_decay():
    assert run(_decay, 1) == [["bias", "norm"]]
