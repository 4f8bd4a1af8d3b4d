"""Traces of fixed steps: which ranks, which steps, every key, what is written, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import torch

from mm_models.config.fsdp2.tools import Tools as Section
from mm_models.errors import UserError
from mm_models.fsdp2.features import profiler

CPU = torch.device("cpu")


def section(profile: dict | None = None, memory: dict | None = None, **static) -> Section:
    content = {"memory_profile": memory or {}, "profile": {**(profile or {}), "static_param": static}}
    return Section.model_validate(content)


def iterate(tools: Section, *, rank: int = 0, device=CPU, until: int = 6) -> None:
    with profiler.Tools(tools, rank=rank, device=device) as running:
        for iteration in range(1, until + 1):
            running.step(iteration)
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(256, 1024) @ torch.ones(1024, 1)


def on(path: Path, **more) -> dict:
    return {"save_path": str(path), "start_step": 2, "end_step": 4, "level": None, **more}


def names(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event}


def test_the_trace_holds_its_steps_and_no_other(tmp_path):
    iterate(section({"enable": True}, **on(tmp_path)))
    (trace,) = tmp_path.iterdir()
    assert trace.name == "rank0.steps2-3.json"
    assert {name for name in names(trace) if name.startswith("iteration")} == {"iteration 2", "iteration 3"}


@pytest.mark.parametrize(
    "key, found", [("record_shapes", "Input Dims"), ("with_memory", "[memory]"), ("with_stack", "test_profiler.py")]
)
def test_every_switch_is_heard(tmp_path, key, found):
    for value in (True, False):
        iterate(section({"enable": True}, **on(tmp_path / str(value), **{key: value})))
        (trace,) = (tmp_path / str(value)).iterdir()
        assert (found in trace.read_text()) == value


@pytest.mark.parametrize("ranks, writes", [([0], [True, False, False]), ([1, 2], [False, True, True])])
def test_ranks(tmp_path, ranks, writes):
    for rank in range(3):
        iterate(section({"enable": True, "ranks": ranks}, **on(tmp_path)), rank=rank)
    assert [(tmp_path / f"rank{rank}.steps2-3.json").exists() for rank in range(3)] == writes


def test_all_ranks():
    assert profiler._wanted(5, [-1]) and not profiler._wanted(5, [0, 1])


def test_a_run_that_ends_early_or_fails_writes_what_it_has(tmp_path):
    iterate(section({"enable": True}, **on(tmp_path / "early")), until=2)
    assert "iteration 2" in names(tmp_path / "early" / "rank0.steps2-3.json")
    with pytest.raises(ZeroDivisionError):
        with profiler.Tools(section({"enable": True}, **on(tmp_path / "failed")), rank=0, device=CPU) as running:
            running.step(2)
            raise ZeroDivisionError
    assert (tmp_path / "failed" / "rank0.steps2-3.json").exists()


def test_a_run_resumed_behind_the_window_writes_nothing(tmp_path):
    tools = section({"enable": True}, **on(tmp_path))
    with profiler.Tools(tools, rank=0, device=CPU) as running:
        for iteration in range(4, 8):
            running.step(iteration)
    assert not list(tmp_path.iterdir())


def test_memory_on_the_cpu(tmp_path):
    iterate(section(memory={"enable": True, "save_path": str(tmp_path), "start_step": 3, "end_step": 4}))
    found = json.loads((tmp_path / "rank0.steps3-3.allocations.json").read_text())
    assert 1024 * 1024 <= found["peak_bytes"] < 1.2 * 1024 * 1024  # torch.ones(256, 1024) and less
    assert found["columns"] == ["ns", "bytes", "held"]
    assert max(held for _, _, held in found["events"]) == found["peak_bytes"]


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_memory_on_an_accelerator(tmp_path, monkeypatch, device):
    calls = []
    memory = Space(
        _record_memory_history=lambda **how: calls.append(how),
        _dump_snapshot=lambda path: calls.append(Path(path).name),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: Space(memory=memory))
    keys = {"enable": True, "save_path": str(tmp_path), "stacks": "python", "max_entries": 7}
    tools = section(memory=keys)
    iterate(tools, device=Space(type=device))
    assert calls == [{"stacks": "python", "max_entries": 7}, "rank0.steps1-1.pickle", {"enabled": None}]


def test_npu_traces_take_every_key(tmp_path, monkeypatch):
    calls = []

    class Recording:
        def __init__(self, **how):
            calls.append(how)

        def __enter__(self):
            calls.append("began")

        def __exit__(self, *exception):
            calls.append("ended")

    module = Space(
        profile=Recording,
        ProfilerLevel=Space(Level0="0", Level1="1", Level2="2", Level_none="none"),
        ProfilerActivity=Space(CPU="cpu", NPU="npu"),
        _ExperimentalConfig=lambda **how: how,
        tensorboard_trace_handler=lambda path, worker_name: (Path(path).name, worker_name),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", Space(profiler=module))
    tools = section({"enable": True}, **on(tmp_path / "here", level="level2", with_memory=True, with_cpu=False))
    profiler.check(tools, device_type="npu", world=1)
    iterate(tools, device=Space(type="npu"))
    assert calls == [
        {
            "activities": ["npu"],
            "record_shapes": False,
            "profile_memory": True,
            "with_stack": False,
            "experimental_config": {"profiler_level": "2"},
            "on_trace_ready": ("here", "rank0.steps2-3"),
        },
        "began",
        "ended",
    ]


REFUSED = {
    "level": ({"enable": True}, {}, {"level": "level1"}, r"level: got 'level1', but only NPU .*level=null"),
    "nothing": ({"enable": True}, {}, {"with_cpu": False}, r"with_cpu is false.*with_cpu=true"),
    "rank": ({"enable": True, "ranks": [0, 4]}, {}, {}, r"profile\.ranks: rank 4 of \[0, 4\] does not exist; there are 2"),
    "dump": ({}, {"enable": True, "dump_ranks": [2]}, {}, r"memory_profile\.dump_ranks: rank 2"),
    "stacks": ({}, {"enable": True, "stacks": "python"}, {}, r"stacks: got 'python'.*stacks=all"),
    "entries": ({}, {"enable": True, "max_entries": 5}, {}, r"max_entries: got 5.*max_entries=null"),
    "overlap": ({"enable": True}, {"enable": True, "end_step": 3}, {"start_step": 2, "end_step": 4}, r"overlap .*Move one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_will_not_happen_is_refused_while_enabled(case):
    profile, memory, static, message = REFUSED[case]
    tools = section(profile, memory, **static)
    with pytest.raises(UserError, match=message):
        profiler.check(tools, device_type="cpu", world=2)
    profiler.check(
        section(profile | {"enable": False}, memory | {"enable": False}, **static), device_type="cpu", world=2
    )
