"""`tools.profile` and `tools.memory_profile`: traces of fixed iterations, written by the ranks that are asked for.

    with Tools(config.tools, rank=..., device=...) as tools:
        for iteration in ...:
            tools.step(iteration)      # before the iteration; counted from 1
            ...

Both cover `start_step` up to, not including, `end_step`; a run that ends earlier writes what it has. Every rank's files carry its
number. What a key asks for is done or refused (`check`), but only while its section is enabled:

    profile           torch's profiler as a Chrome trace; on NPU torch_npu's, of depth `level`, as MindStudio reads it
    memory_profile    on CUDA and NPU the allocator's history as a snapshot (pytorch.org/memory_viz); on the CPU, which has no such
                      allocator, every allocation of tensor memory in order, as JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from mm_models.errors import UserError
from mm_models.fsdp2.features.allocations import Allocations

ALL_RANKS = [-1]


def check(tools: Any, *, device_type: str, world: int) -> None:
    """Refuse what an enabled section of `tools` asks for and `device_type` has not, and ranks that do not exist."""
    profile, memory = tools.profile, tools.memory_profile
    for key, section, ranks in (
        ("profile.ranks", profile, profile.ranks),
        ("memory_profile.dump_ranks", memory, memory.dump_ranks),
    ):
        if section.enable and ranks != ALL_RANKS and (wrong := [rank for rank in ranks if not 0 <= rank < world]):
            raise UserError(
                f"tools.{key}: rank {wrong[0]} of {ranks} does not exist; there are {world}. [-1] means all."
            )
    static = profile.static_param
    if profile.enable and device_type != "npu" and static.level is not None:
        raise UserError(
            f"tools.profile.static_param.level: got {static.level!r}, but only NPU traces have levels, not {device_type}. "
            "Set tools.profile.static_param.level=null."
        )
    if profile.enable and device_type == "cpu" and not static.with_cpu:
        raise UserError(
            "tools.profile.static_param.with_cpu is false, and on the CPU there is nothing else to trace. "
            "Set tools.profile.static_param.with_cpu=true."
        )
    if memory.enable and device_type == "cpu":
        _check_cpu_memory(profile, memory)


def _check_cpu_memory(profile: Any, memory: Any) -> None:
    for name, default in (("stacks", "all"), ("max_entries", None)):
        if getattr(memory, name) != default:
            raise UserError(
                f"tools.memory_profile.{name}: got {getattr(memory, name)!r}, but the record of the CPU's allocations has none. "
                f"Set tools.memory_profile.{name}={'null' if default is None else default}."
            )
    first, last = profile.static_param.start_step, profile.static_param.end_step
    if profile.enable and first < memory.end_step and memory.start_step < last:
        raise UserError(
            f"tools: on the CPU both sections need torch's profiler, and their steps overlap (profile {first} to {last}, "
            f"memory_profile {memory.start_step} to {memory.end_step}). Move one."
        )


class Tools:
    """What is recorded on this rank. Nothing, at no cost, where no section is enabled for it."""

    def __init__(self, tools: Any, *, rank: int, device: torch.device):
        self._windows: list[_Window] = []
        profile, memory = tools.profile, tools.memory_profile
        if profile.enable and _wanted(rank, profile.ranks):
            static = profile.static_param
            record = _npu_trace if device.type == "npu" else _trace
            self._windows.append(_Window(static, lambda name: record(static, name, device), f"rank{rank}"))
        if memory.enable and _wanted(rank, memory.dump_ranks):
            kind = _CpuMemory if device.type == "cpu" else _DeviceMemory
            self._windows.append(_Window(memory, lambda name: kind(memory, name, device), f"rank{rank}"))

    def __enter__(self) -> Tools:
        return self

    def step(self, iteration: int) -> None:
        """Iteration `iteration` begins now."""
        for window in self._windows:
            window.step(iteration)

    def __exit__(self, *exception) -> None:
        for window in self._windows:
            window.stop()


def _wanted(rank: int, ranks: list[int]) -> bool:
    return ranks == ALL_RANKS or rank in ranks


class _Window:
    """Enters a recording at `start_step` and leaves it at `end_step`, once. `begin` is given the files' name without ending."""

    def __init__(self, section: Any, begin: Callable[[str], AbstractContextManager], prefix: str):
        self.start, self.end = section.start_step, section.end_step
        self.begin, self.name = begin, f"{prefix}.steps{self.start}-{self.end - 1}"
        self.running: AbstractContextManager | None = None

    def step(self, iteration: int) -> None:
        if iteration >= self.end:
            self.stop()
        elif iteration >= self.start and self.running is None:
            self.running = self.begin(self.name)
            self.running.__enter__()

    def stop(self) -> None:
        if self.running is not None:
            self.running.__exit__(None, None, None)
            self.running = None


def _trace(static: Any, name: str, device: torch.device) -> AbstractContextManager:
    """torch's profiler; `NAME.json` in `save_path`, a Chrome trace."""
    activities = [ProfilerActivity.CPU] if static.with_cpu else []
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path = _folder(static.save_path) / f"{name}.json"
    return torch.profiler.profile(
        activities=activities,
        record_shapes=static.record_shapes,
        profile_memory=static.with_memory,
        with_stack=static.with_stack,
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
    )


def _npu_trace(static: Any, name: str, device: torch.device) -> AbstractContextManager:
    """torch_npu's profiler; a folder that starts with `NAME` in `save_path`."""
    from torch_npu import profiler

    levels = {"level_none": "Level_none", "level0": "Level0", "level1": "Level1", "level2": "Level2"}
    level = getattr(profiler.ProfilerLevel, levels[static.level or "level1"])
    activities = [profiler.ProfilerActivity.NPU]
    if static.with_cpu:
        activities.append(profiler.ProfilerActivity.CPU)
    return profiler.profile(
        activities=activities,
        record_shapes=static.record_shapes,
        profile_memory=static.with_memory,
        with_stack=static.with_stack,
        experimental_config=profiler._ExperimentalConfig(profiler_level=level),
        on_trace_ready=profiler.tensorboard_trace_handler(str(_folder(static.save_path)), worker_name=name),
    )


class _CpuMemory(Allocations):
    """`NAME.allocations.json`: the peak, and [nanoseconds, bytes, bytes held then] for each allocation (free: negative)."""

    def __init__(self, memory: Any, name: str, device: torch.device):
        super().__init__()
        self.path = _folder(memory.save_path) / f"{name}.allocations.json"

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        content = {"peak_bytes": self.peak, "columns": ["ns", "bytes", "held"], "events": self.events}
        self.path.write_text(json.dumps(content))


class _DeviceMemory:
    """`NAME.pickle`: the history of the accelerator's allocator, as its own tool writes it."""

    def __init__(self, memory: Any, name: str, device: torch.device):
        self.history = torch.get_device_module(device).memory
        self.path = _folder(memory.save_path) / f"{name}.pickle"
        self.options = {"stacks": memory.stacks}
        if memory.max_entries is not None:
            self.options["max_entries"] = memory.max_entries

    def __enter__(self) -> None:
        self.history._record_memory_history(**self.options)

    def __exit__(self, *exception) -> None:
        self.history._dump_snapshot(str(self.path))
        self.history._record_memory_history(enabled=None)


def _folder(path: str) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
