"""Recompute: the same gradients bit by bit, chosen experts replayed, several calls in flight, under FSDP and expert parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from mm_models.fsdp2.features import recompute
from mm_models.fsdp2.features.allocations import Allocations
from mm_models.fsdp2.features.saved import recompute_saves, saved_bytes
from tests.fsdp2.features.models import EXPERTS, Stack, batch, gradients, names, stack
from tests.harness import run

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])


def upset(model, seed: int = 5) -> None:
    """Make every router choose other experts from now on; what it weighs them with stays."""
    torch.manual_seed(seed)
    for layer in model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(EXPERTS))


def trained(model, wrapped: list[str], use_reentrant: bool, *, between=None, seeds=(1, 2), **how) -> dict:
    """Gradients of two micro-batches whose forwards both come before their backwards, the first one's first."""
    if wrapped:
        recompute.apply(model, wrapped, use_reentrant=use_reentrant)
    losses = [model(*batch(seed)) for seed in seeds]
    if between:
        between(model)
    for loss in losses:
        loss.backward()
    return gradients(model)


def equal(found: dict, wanted: dict) -> None:
    assert list(found) == list(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@REENTRANT
def test_gradients_are_the_same_bit_by_bit(use_reentrant):
    model = stack()
    equal(trained(model, names(model), use_reentrant), trained(stack(), [], use_reentrant))


@REENTRANT
def test_chosen_experts_are_replayed(use_reentrant):
    """Whatever happens to the choice between the passes, here a new correction bias, a token goes back where it went."""
    model = stack()
    equal(trained(model, names(model), use_reentrant, between=upset), trained(stack(), [], use_reentrant))


def test_without_replay_the_choice_does_flip(monkeypatch):
    """What the test above would miss: the same with a mixture of experts that is not told."""
    monkeypatch.setattr(recompute._Noting, "note", lambda self, indices: None)
    monkeypatch.setattr(recompute._Replaying, "chosen", lambda self: None)
    model = stack()
    found = trained(model, names(model), True, between=upset)
    wanted = trained(stack(), [], True)
    assert not torch.equal(found["layers.0.mlp.experts.down_proj"], wanted["layers.0.mlp.experts.down_proj"])


@REENTRANT
def test_a_wrapped_module_inside_another_replays_too(use_reentrant):
    model = stack()
    wrapped = [*names(model), *(f"{name}.mlp" for name in names(model))]
    equal(trained(model, wrapped[::-1], use_reentrant, between=upset), trained(stack(), [], use_reentrant))
    assert [layer.mlp.replay for layer in model.layers] == [None] * 3


@REENTRANT
def test_a_graph_kept_for_two_backward_passes(use_reentrant):
    model, plain = stack(), stack()
    recompute.apply(model, names(model), use_reentrant=use_reentrant)
    for one in (model, plain):
        loss = one(*batch(1))
        loss.backward(retain_graph=True)
        loss.backward()
    equal(gradients(model), gradients(plain))


@REENTRANT
def test_frozen_parts_and_inputs(use_reentrant):
    """Nothing trainable in layer 0, so nothing to recompute for; layer 1 has an input without gradient."""
    models = [stack(), stack()]
    for model in models:
        model.layers[0].requires_grad_(False)
    recompute.apply(models[0], names(models[0]), use_reentrant=use_reentrant)
    for model in models:
        model(*batch(1)).backward()
    equal(gradients(models[0]), gradients(models[1]))


def test_a_failure_in_the_forward_leaves_no_replay_behind(monkeypatch):
    model = stack()
    recompute.apply(model, names(model))
    monkeypatch.setattr(model.layers[1], "down", None)
    with pytest.raises(TypeError):
        model(*batch(1))
    assert [layer.mlp.replay for layer in model.layers] == [None] * 3


def test_dropout_draws_the_same_numbers_again():
    found = []
    for wrapped in (True, False):
        model = stack()
        for layer in model.layers:
            layer.down = torch.nn.Sequential(layer.down, torch.nn.Dropout(0.5))
        found.append(trained(model, names(model) if wrapped else [], False))
    equal(*found)


def test_the_peak_falls_by_what_was_computed_beforehand():
    def peak(wrapped: bool) -> int:
        model = stack(layers=6)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if wrapped:
            recompute.apply(model, names(model))
        x, scale = batch(1, length=400)
        with Allocations() as found:
            model(x, scale).backward()
        return found.peak

    x, scale = batch(1, length=400)
    expected = recompute_saves([saved_bytes(layer, x, scale=scale) for layer in stack(layers=6).layers])
    assert peak(False) - peak(True) == pytest.approx(expected, rel=0.1)


def test_wrapping_twice_is_refused():
    model = stack()
    recompute.apply(model, ["layers.0"])
    with pytest.raises(AssertionError, match=r"layers\.0: its forward is wrapped already"):
        recompute.apply(model, ["layers.0"])


def sharded(rank: int, wrapped: bool, use_reentrant: bool) -> dict:
    """Router and experts are groups of their own inside each layer's group; each rank has its own micro-batches."""
    model = stack()
    if wrapped:
        recompute.apply(model, names(model), use_reentrant=use_reentrant)
    for layer in model.layers:
        fully_shard(layer.mlp.gate)
        fully_shard(layer.mlp.experts)
        fully_shard(layer)
    fully_shard(model)
    bias = [layer.mlp.gate.e_score_correction_bias.clone() for layer in model.layers]
    for step in range(2):
        loss = model(*batch(1 + 2 * step + rank))
        if wrapped:
            upset(model)
        loss.backward()
        for layer, before in zip(model.layers, bias):
            layer.mlp.gate.e_score_correction_bias.copy_(before)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@REENTRANT
def test_under_fully_shard(use_reentrant):
    equal(run(sharded, 2, True, use_reentrant)[1], run(sharded, 2, False, use_reentrant)[1])


def parallel(rank: int, wrapped: bool, use_reentrant: bool) -> dict:
    """Four experts on each rank."""
    whole = stack()
    model = Stack(local_experts=EXPERTS // 2, ep_group=dist.group.WORLD)
    with torch.no_grad():
        mine = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
            mine[name].copy_(tensor.chunk(2)[rank] if ".experts." in name else tensor)
    return trained(
        model,
        names(model) if wrapped else [],
        use_reentrant,
        between=upset if wrapped else None,
        seeds=(rank, 2 + rank),
    )


@REENTRANT
def test_with_experts_on_two_ranks(use_reentrant):
    for found, wanted in zip(run(parallel, 2, True, use_reentrant), run(parallel, 2, False, use_reentrant)):
        equal(found, wanted)
