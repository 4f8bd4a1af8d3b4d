"""Chunked cross entropy: the loss, both gradients, odd chunks, chunks and batches without labels, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mm_models.components import loss as losses
from mm_models.components.loss import IGNORE, chunked_cross_entropy, dynamic_chunk, peak_bytes, summed_cross_entropy
from mm_models.fsdp2.features.allocations import Allocations

TOKENS, VOCABULARY, HIDDEN = 50, 37, 16


def inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    labels[0, 10:40] = IGNORE  # whole chunks of 7 and of 10 without a label
    return hidden, weight, labels


def gradients(loss, hidden, weight, scale=1.0):
    return torch.autograd.grad(loss * scale, (hidden, weight))


def reference(hidden, weight, labels, scale=1.0):
    """In fp64, whole."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(
        F.linear(hidden, weight).view(-1, VOCABULARY), labels.view(-1), ignore_index=IGNORE, reduction="sum"
    )
    return loss, *gradients(loss, hidden, weight, scale)


def distance(found, wanted) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("chunk", [1, 7, 10, 64, 100, 1000])
def test_loss_and_gradients_are_the_whole_ones(chunk):
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=chunk)
    wanted, wanted_hidden, wanted_weight = reference(hidden, weight, labels, scale=0.125)
    assert loss.dtype == torch.float32 and loss.shape == ()
    grad_hidden, grad_weight = gradients(loss, hidden, weight, scale=0.125)
    assert abs(loss.item() / wanted.item() - 1) < 1e-6
    assert distance(grad_hidden, wanted_hidden) < 1e-6 and distance(grad_weight, wanted_weight) < 1e-6
    assert torch.equal(grad_hidden[0, 10:40], torch.zeros(30, HIDDEN))


def test_bf16_error_does_not_grow_with_the_number_of_chunks():
    hidden, weight, labels = inputs(torch.bfloat16)
    wanted = reference(hidden, weight, labels)[2]
    errors = {
        chunk: distance(
            gradients(chunked_cross_entropy(hidden, weight, labels, chunk=chunk), hidden, weight)[1], wanted
        )
        for chunk in (100, 10, 1)
    }
    assert max(errors.values()) < 1.5 * errors[100] < 0.01, errors


def test_blocks_of_the_vocabulary_change_nothing(monkeypatch):
    hidden, weight, labels = inputs(torch.bfloat16)
    whole = gradients(chunked_cross_entropy(hidden, weight, labels, chunk=7), hidden, weight)[1]
    monkeypatch.setattr(losses, "BLOCK", 5)
    torch.testing.assert_close(
        gradients(chunked_cross_entropy(hidden, weight, labels, chunk=7), hidden, weight)[1],
        whole,
        rtol=1e-2,
        atol=1e-3,
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, labels = inputs()
    whole = gradients(chunked_cross_entropy(hidden, weight, labels, chunk=7), hidden, weight)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    chunked_cross_entropy(hidden, weight, labels, chunk=7).backward()
    still, trained, wanted = (hidden, weight, whole[1]) if frozen == "hidden" else (weight, hidden, whole[0])
    assert still.grad is None and torch.equal(trained.grad, wanted)


def test_no_label_at_all_is_zero_with_a_gradient():
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), chunk=7)
    grads = gradients(loss, hidden, weight)
    assert loss.item() == 0.0 and all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, labels = inputs()
    with torch.no_grad(), Allocations() as found:
        loss = chunked_cross_entropy(hidden, weight, labels, chunk=10)
    assert loss.grad_fn is None and found.peak < VOCABULARY * HIDDEN * 4 + 10 * VOCABULARY * 9
    torch.testing.assert_close(loss, summed_cross_entropy(F.linear(hidden, weight), labels).detach())


def test_a_second_backward_is_refused():
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=10)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


@pytest.mark.parametrize(
    "batch, total, chunk", [(1, 4096, 4096), (2, 4096, 4096), (3, 4096, 3 * 1024), (1, 5000, 4096), (8, 4, 8)]
)
def test_the_dynamic_rule(batch, total, chunk):
    assert dynamic_chunk(batch, total) == chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, hidden, chunk", [(512, 64, None), (512, 64, 32), (512, 64, 100), (64, 256, 16)])
def test_memory_is_what_was_computed_beforehand(dtype, tokens, hidden, chunk):
    vocabulary = 3000
    rows = torch.randn(1, tokens, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens))
    with Allocations() as found:
        if chunk is None:
            loss = summed_cross_entropy(F.linear(rows, weight), labels)
        else:
            loss = chunked_cross_entropy(rows, weight, labels, chunk=chunk)
        loss.backward()
    expected = peak_bytes(tokens=tokens, vocabulary=vocabulary, hidden=hidden, dtype=dtype, chunk=chunk)
    assert found.peak == pytest.approx(expected, rel=0.01)
