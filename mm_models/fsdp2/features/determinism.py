"""`training.use_deter_comp`: the same run twice gives the same bits.

Libraries read their variables once, when they start: `enable` comes before the first collective and before the first tensor on the
device. A variable that the user has set to something else is an error, not overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from mm_models.errors import UserError

VARIABLES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8")},
    "npu": {"HCCL_DETERMINISTIC": ("true", "strict")},
}
"""Device -> variable -> values that make it deterministic, ours first (cuBLAS: one workspace per stream; HCCL: order of sums)."""


def check(device_type: str) -> None:
    """Refuse variables that contradict determinism. Changes nothing."""
    for name, good in VARIABLES[device_type].items():
        got = os.environ.get(name)
        if got is not None and got.lower() not in good:
            raise UserError(
                f"training.use_deter_comp: {name} is {got!r} in the environment, which is not deterministic; "
                f"expected {' or '.join(good)}. Unset it or set it so."
            )


def enable(device_type: str) -> list[str]:
    """Ask every library for deterministic kernels. An operation that has none raises when it is called. Returns lines to print."""
    check(device_type)
    lines = []
    for name, good in VARIABLES[device_type].items():
        if name not in os.environ:
            os.environ[name] = good[0]
            lines.append(f"deterministic: {name}={good[0]} set for this process")
    torch.use_deterministic_algorithms(True)
    # It would fill every torch.empty, which costs a pass over memory each time; nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    return [*lines, f"deterministic: torch's deterministic algorithms on {device_type}"]
