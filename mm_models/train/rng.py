"""Random states of one rank: Python, NumPy, torch and the accelerator, as plain data that `weights_only=True` loads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch


def seed(number: int) -> None:
    """Seed Python, NumPy, torch and the accelerator."""
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def capture() -> dict[str, Any]:
    """The states under Megatron's keys; NumPy's as tensors and numbers."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    assert kind == "MT19937"
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": (torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(gauss)),
        "torch_rng_state": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["accelerator_rng_state"] = torch.get_device_module().get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Make `capture()` return `state` again."""
    version, internal, gauss_next = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss_next))
    keys, position, has_gauss, gauss = state["np_rng_state"]
    numpy.random.set_state(("MT19937", keys.numpy().astype("uint32"), position, has_gauss, gauss))
    torch.set_rng_state(state["torch_rng_state"].clone())
    if "accelerator_rng_state" in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state["accelerator_rng_state"].clone())
