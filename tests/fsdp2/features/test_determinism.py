"""Deterministic mode: what it sets, what it refuses, and two runs that are the same bit by bit."""

from __future__ import annotations

import os

import pytest
import torch

from mm_models.errors import UserError
from mm_models.fsdp2.features import determinism, recompute
from tests.fsdp2.features.models import batch, gradients, names, stack
from tests.fsdp2.features.test_recompute import equal
from tests.harness import run


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for variables in determinism.VARIABLES.values():
        for name in variables:
            monkeypatch.setenv(name, "")  # so that what a test sets is undone
            monkeypatch.delenv(name)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.parametrize(
    "device, name, bad", [("npu", "HCCL_DETERMINISTIC", "false"), ("cuda", "CUBLAS_WORKSPACE_CONFIG", ":0:0")]
)
def test_variables_are_set_kept_or_refused(device, name, bad, monkeypatch):
    good = determinism.VARIABLES[device][name]
    lines = determinism.enable(device)
    assert os.environ[name] == good[0] and lines[0] == f"deterministic: {name}={good[0]} set for this process"
    monkeypatch.setenv(name, good[1])
    assert not any(name in line for line in determinism.enable(device)) and os.environ[name] == good[1]
    monkeypatch.setenv(name, bad)
    with pytest.raises(UserError, match=rf"{name} is '{bad}' in the environment.*expected {good[0]}"):
        determinism.check(device)


def test_torch_is_asked_and_memory_is_not_filled():
    determinism.enable("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.nn.functional.max_unpool2d(torch.randn(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64), 2)


def steps(rank: int) -> dict:
    determinism.enable("cpu")
    model = stack()
    recompute.apply(model, names(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        model(*batch(step)).backward()
        optimizer.step()
    return gradients(model) | {name: p.detach() for name, p in model.named_parameters() if "mlp" in name}


def test_two_runs_are_the_same_bit_by_bit():
    equal(run(steps, 1)[0], run(steps, 1)[0])
