"""The device of this process: cpu, cuda or npu, and what megatron-core needs on it."""

from __future__ import annotations

import torch


def device_type() -> str:
    """One of "cpu", "cuda", "npu"."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def backend(device: str) -> str:
    """The torch.distributed backend of a device type."""
    return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device]


def choose(local_rank: int = 0) -> torch.device:
    """This process's device, made the current one."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        import torch_npu  # noqa: F401  registers the device and its collectives
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def prepare(local_rank: int = 0) -> torch.device:
    """Make megatron-core usable on this process's device and return that device."""
    kind = device_type()
    if kind == "cpu":
        from mm_models.device.cpu import patch_core

        patch_core()
    if kind == "npu":
        from torch_npu.contrib import transfer_to_npu  # noqa: F401  redirects torch.cuda.* and device="cuda"
    return choose(local_rank)
