"""The CPU patches: there without an accelerator, absent beside one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.harness import run


def patched_case(rank: int) -> dict:
    import megatron.core.pipeline_parallel.schedules as schedules

    from mm_models.device import prepare

    before = torch.zeros(1).type()
    device = prepare()
    return {
        "device": str(device),
        "current": str(torch.cuda.current_device()),
        "literal": str(schedules.torch.zeros([], device="cuda").device),
        "kept": schedules.torch.int is torch.int,
        "types": (before, torch.zeros(1).type(), torch.zeros(1, dtype=torch.bfloat16).type()),
        "cast": str(torch.zeros(1).type(torch.float64).dtype),
    }


def test_core_runs_on_cpu():
    assert run(patched_case, 1) == [
        {
            "device": "cpu",
            "current": "cpu",
            "literal": "cpu",
            "kept": True,
            "types": ("torch.FloatTensor", "torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"),
            "cast": "torch.float64",
        }
    ]


def test_nothing_is_patched_beside_an_accelerator():
    code = """
import torch
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.accelerator.set_device_index = lambda index: None
before = (torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.type)
from mm_models.device import prepare
assert str(prepare(0)) == "cuda:0"
assert before == (torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.type)
import mm_models.device.cpu as cpu
try:
    cpu.patch_core()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "must not patch megatron-core beside a cuda" in done.stdout


@pytest.mark.parametrize(
    "module", ["mm_models.layout", "mm_models.registry", "mm_models.config.model", "mm_models.errors"]
)
def test_the_lowest_row_imports_no_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
