"""What the choices of the file become on a platform (cpu, cuda, npu), and which of them cannot run there.

Operators are looked up in the registry's table `ops`: a fused variant of ours exists where the table has one.
"""

from __future__ import annotations

from mm_models.config.fsdp2.run import RunConfig
from mm_models.errors import UserError, unknown_name
from mm_models.registry import table

PLATFORMS = ("cpu", "cuda", "npu")
FUSED_ATTENTION = ("flash_attention_2", "sdpa")
"""Both mean the exact fused attention of the platform; the first is Hugging Face's name of one kernel."""
EXPERT_OPS = ("grouped_matmul", "swiglu")
"""What ep_plan.use_npu_fused_ops is about."""


def check_platform(config: RunConfig, platform: str, *, experts: bool = True) -> list[str]:
    """What the file's choices became on `platform`, a line each. A `UserError` with the override that would run there.

    `experts`: whether the model has any.
    """
    if platform not in PLATFORMS:
        raise unknown_name("platform", platform, PLATFORMS)
    return [
        _attention(config.model.attn_implementation, platform),
        *(_experts(config.parallel.ep_plan.use_npu_fused_ops, platform) if experts else ()),
        *_tools(config),
        *_idle(config, platform),
    ]


def variant(op: str, platform: str) -> str:
    """The variant of `op` that runs on `platform`: its own, else the torch definition."""
    return platform if f"{op}/{platform}" in table("ops") else "torch"


def _attention(asked: str, platform: str) -> str:
    if asked not in FUSED_ATTENTION:
        why = (
            "that is not the fused attention this target runs" if asked != "eager" else "only fused attention is there"
        )
        raise UserError(f"model.attn_implementation: got {asked!r}; {why}. Runs: model.attn_implementation=sdpa")
    kernels = {op: variant(op, platform) for op in ("causal_attention", "segment_attention")}
    words = {
        name: "torch scaled_dot_product_attention" if name == "torch" else f"{name} kernel" for name in kernels.values()
    }
    text, vision = (words[kernels[op]] for op in ("causal_attention", "segment_attention"))
    what = text if text == vision else f"{text} in the decoder, {vision} in the vision tower"
    return f"attention: model.attn_implementation {asked} is {what} on {platform}"


def _experts(asked: bool | None, platform: str) -> list[str]:
    have = [op for op in EXPERT_OPS if variant(op, platform) == "npu"]
    if asked and not have:
        raise UserError(
            f"parallel.ep_plan.use_npu_fused_ops: true, but there is no fused op for experts on {platform}; the torch definitions run. "
            "Runs: parallel.ep_plan.use_npu_fused_ops=null"
        )
    if asked is False or not have:
        return [f"experts: torch definitions on {platform} (parallel.ep_plan.use_npu_fused_ops {_yaml(asked)})"]
    return [f"experts: npu variants of {', '.join(have)} (parallel.ep_plan.use_npu_fused_ops {_yaml(asked)})"]


def _tools(config: RunConfig) -> list[str]:
    profile, memory, dump = config.tools.profile, config.tools.memory_profile, config.tools.token_dump
    lines = []
    if profile.enable:
        lines.append(f"profiler: ranks {profile.ranks}, traces in {profile.static_param.save_path}")
    if memory.enable:
        lines.append(f"memory record: ranks {memory.dump_ranks}, in {memory.save_path}")
    if dump.enable:
        lines.append(f"token dump: the first {dump.batches} steps, in {dump.dir}")
    return lines


def _idle(config: RunConfig, platform: str) -> list[str]:
    """What is accepted and does nothing, each with the reason."""
    data, idle = config.data, []
    if config.model.trust_remote_code or data.dataset_param.preprocess_parameters.trust_remote_code:
        idle.append("trust_remote_code: no code of a model folder runs")
    if data.dataloader_param.pin_memory and platform == "cpu":
        idle.append("dataloader_param.pin_memory: there is no device to copy to")
    if data.dataloader_param.enable_preload and platform == "cpu":
        idle.append("dataloader_param.enable_preload: there is no device to copy to")
    if config.parallel.fsdp_plan.cpu_offload and platform == "cpu":
        idle.append("fsdp_plan.cpu_offload: parameters are on the CPU already")
    return [f"accepted without effect: {line}" for line in idle]


def _yaml(value: bool | None) -> str:
    return "null" if value is None else str(value).lower()
