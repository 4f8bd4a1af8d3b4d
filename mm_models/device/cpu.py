"""What megatron-core 0.16.1 needs to run without CUDA: four narrow patches, applied only when no accelerator is there.

| patch                             | core line it answers                                                                     |
|-----------------------------------|------------------------------------------------------------------------------------------|
| `torch.cuda.current_device`       | p2p_communication.py 190-321, param_and_grad_buffer.py 783-806, mappings.py 91-181       |
| `torch.cuda.synchronize`          | p2p_communication.py 242, 398                                                            |
| `torch.*(device="cuda")`, 4 files | schedules.py 596, 983, 2138; optimizer.py 473-485; clip_grads.py 90, 167; utils.py 631   |
| `Tensor.type()` string            | optimizer.py 671-699, distrib_optimizer.py 361-435, 582: 'torch.cuda.FloatTensor'        |

On NPU `torch_npu.contrib.transfer_to_npu` does the same job; on CUDA nothing is patched (tests/device/test_cpu.py).
"""

from __future__ import annotations

import importlib
from functools import cache, wraps

import torch

LITERAL_CUDA_MODULES = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)


class _TorchOnCpu:
    """Stands for the name `torch` inside one core module; factory calls with a CUDA device are made on the CPU."""

    _FACTORIES = frozenset({"tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange"})

    def __getattr__(self, name: str):
        found = getattr(torch, name)
        if name not in self._FACTORIES:
            return found

        @wraps(found)
        def on_cpu(*args, device=None, **kwargs):
            if device is not None and str(device).startswith("cuda"):
                device = torch.device("cpu")
            return found(*args, device=device, **kwargs)

        return on_cpu


@cache
def patch_core() -> tuple[str, ...]:
    """Apply the patches, once. Returns their names. Refuses to run beside an accelerator."""
    if torch.accelerator.is_available():
        raise RuntimeError(
            f"device.cpu must not patch megatron-core beside a {torch.accelerator.current_accelerator()}"
        )
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    proxy = _TorchOnCpu()
    for name in LITERAL_CUDA_MODULES:
        importlib.import_module(name).torch = proxy
    _patch_type()
    return ("torch.cuda.current_device", "torch.cuda.synchronize", *LITERAL_CUDA_MODULES, "Tensor.type")


def _patch_type() -> None:
    original = torch.Tensor.type

    @wraps(original)
    def type_(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_
