"""`tools`: the profiler, the memory snapshot and the dump of the first batches. A section that is not enabled is checked and kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mm_models.config.fsdp2.kinds import Count, Text, only
from mm_models.config.strict import StrictModel

Ranks = Annotated[list[Annotated[int, Field(ge=-1)]], Field(min_length=1)]
"""Ranks that record; [-1] is all of them."""


class Window(StrictModel):
    """Iterations `start_step` to `end_step`, both counted from 1; the last is not part of it."""

    @model_validator(mode="after")
    def _check(self):
        if self.end_step <= self.start_step:
            raise ValueError(f"end_step {self.end_step} must be greater than start_step {self.start_step}")
        return self


class StaticParam(Window):
    level: Literal["level0", "level1", "level2", "level_none"] | None = None
    """Depth of an NPU trace; nothing else has levels."""
    with_stack: bool = False
    with_memory: bool = False
    record_shapes: bool = False
    with_cpu: bool = True
    save_path: Text = "./profiling"
    start_step: Count = 10
    end_step: Count = 11


class Profile(StrictModel):
    enable: bool = False
    profile_type: Annotated[str, only("static", why="traces are taken at fixed steps alone")] = "static"
    ranks: Ranks = Field(default=[0])
    static_param: StaticParam = StaticParam()


class MemoryProfile(Window):
    enable: bool = False
    start_step: Count = 1
    end_step: Count = 2
    save_path: Text = "./memory_snapshot"
    dump_ranks: Ranks = Field(default=[0])
    stacks: Literal["all", "python"] = "all"
    max_entries: Count | None = None


class TokenDump(StrictModel):
    """The batches of a run's first steps as the model receives them, for `mm-models tokens`."""

    enable: bool = False
    dir: Text = "./token_dump"
    batches: Count = 8


class Tools(StrictModel):
    profile: Profile = Profile()
    memory_profile: MemoryProfile = MemoryProfile()
    token_dump: TokenDump = TokenDump()
