"""`parallel`: how many ranks hold a piece of what, and which modules are gathered together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mm_models.config.fsdp2.kinds import Count, Patterns, only
from mm_models.config.strict import StrictModel

Dtype = Literal["bf16", "fp32"]


def _shard_size(value: Any) -> int | str:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError("expected auto or a whole number of ranks, at least 1")
    return value


class FsdpPlan(StrictModel):
    """Which modules are a group of their own, and in which dtype they compute. Parameters are fp32 in any case."""

    apply_modules: Patterns = Field(default_factory=list)
    ignored_modules: Patterns = Field(default_factory=list)
    """Modules whose parameters are replicated on every rank."""
    param_dtype: Dtype | None = None
    """What parameters are cast to for computing; null is fp32. The router stays fp32."""
    reduce_dtype: Dtype | None = None
    """What gradients are summed in; null is fp32."""
    output_dtype: Dtype | None = None
    """What a group's floating outputs are cast to; null leaves them."""
    cast_forward_inputs: Annotated[
        bool, only(False, why="inputs keep their dtype, so that fp32 positions and routing stay exact")
    ] = False
    reshard_after_forward: bool = True
    num_to_forward_prefetch: Annotated[int, Field(ge=0)] = 0
    num_to_backward_prefetch: Annotated[int, Field(ge=0)] = 0
    cpu_offload: bool = False
    defer_gradient_reduce: bool = True
    """Under gradient accumulation, exchange gradients once a step: every rank keeps its whole gradient until then. false exchanges
    them after every micro-batch and keeps nothing whole."""


class EpPlan(StrictModel):
    """Which modules are routed experts, and how tokens reach them."""

    apply_modules: Patterns = Field(default_factory=list)
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    use_npu_fused_ops: bool | None = None
    """null: where the ops exist."""


class Parallel(StrictModel):
    fully_shard_parallel_size: Annotated[Any, AfterValidator(_shard_size)] = "auto"
    """Ranks a parameter is cut over. auto is all of them; a smaller number keeps world / number copies (HSDP)."""
    fsdp_plan: FsdpPlan = FsdpPlan()
    ring_attention_size: Annotated[int, only(1, why="ring attention is not there yet")] = 1
    ulysses_parallel_size: Annotated[int, only(1, why="Ulysses attention is not there yet")] = 1
    expert_parallel_size: Count = 1
    expert_fully_shard_parallel_size: Count | None = None
    """Ranks the experts of one expert-parallel rank are cut over, along dimension 1; null follows fully_shard_parallel_size."""
    ep_plan: EpPlan = EpPlan()
    data_parallel_size: Count | None = None
    """If given, it must be what the number of processes makes it."""
    tensor_parallel_size: Annotated[
        int, only(1, why="this target has no tensor parallelism; the Megatron target (pretrain_vlm.py) has")
    ] = 1

    @model_validator(mode="after")
    def _check(self):
        if self.expert_parallel_size > 1 and not self.ep_plan.apply_modules:
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} with an empty ep_plan.apply_modules would spread nothing; "
                "name the experts there or set it to 1"
            )
        if self.expert_fully_shard_parallel_size and not self.ep_plan.apply_modules:
            raise ValueError(
                f"expert_fully_shard_parallel_size {self.expert_fully_shard_parallel_size} with an empty "
                "ep_plan.apply_modules would cut nothing; name the experts there or drop it"
            )
        return self
