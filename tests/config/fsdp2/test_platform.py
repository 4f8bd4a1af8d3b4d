"""What the file's choices become on cpu, cuda and npu, and what cannot run there, with the override that would."""

from __future__ import annotations

import pytest

from mm_models.config.fsdp2 import load_config
from mm_models.config.fsdp2.platform import PLATFORMS, check_platform
from mm_models.errors import UserError
from mm_models.registry import table
from tests.config.fsdp2.kit import SEED


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa"])
def test_fused_attention_is_that_of_the_platform(platform, name):
    """X3: the published value runs everywhere, and the line says what it became; no kernel is named that does not exist."""
    lines = check_platform(load_config(SEED, [f"model.attn_implementation={name}"]), platform)
    kernel = (
        f"{platform} kernel" if f"causal_attention/{platform}" in table("ops") else "torch scaled_dot_product_attention"
    )
    assert lines[0] == f"attention: model.attn_implementation {name} is {kernel} on {platform}"


def test_a_kernel_of_ours_is_named_when_there_is_one(monkeypatch):
    ops = table("ops")
    monkeypatch.setitem(ops._targets, "causal_attention/npu", "mm_models.ops.reference:causal_attention")
    config = load_config(SEED)
    assert (
        check_platform(config, "npu")[0]
        == "attention: model.attn_implementation flash_attention_2 is npu kernel in the decoder, "
        "torch scaled_dot_product_attention in the vision tower on npu"
    )
    assert "npu kernel" not in check_platform(config, "cuda")[0]


@pytest.mark.parametrize("name", ["eager", "flash_attention_3", "Flash_Attention_2"])
def test_other_attention_is_refused_with_the_override(name):
    with pytest.raises(UserError, match=rf"got '{name}'.*Runs: model\.attn_implementation=sdpa"):
        check_platform(load_config(SEED, [f"model.attn_implementation={name}"]), "npu")


def test_fused_expert_ops(monkeypatch):
    """null takes what exists and says so; true insists."""
    asked = load_config(SEED, ["parallel.ep_plan.use_npu_fused_ops=true"])
    for platform in PLATFORMS:
        with pytest.raises(UserError, match=r"Runs: parallel\.ep_plan\.use_npu_fused_ops=null"):
            check_platform(asked, platform)
    monkeypatch.setitem(table("ops")._targets, "grouped_matmul/npu", "mm_models.ops.reference:grouped_matmul")
    assert "experts: npu variants of grouped_matmul (parallel.ep_plan.use_npu_fused_ops true)" in check_platform(
        asked, "npu"
    )
    assert any("use_npu_fused_ops null" in line for line in check_platform(load_config(SEED), "npu"))
    with pytest.raises(UserError, match="on cpu"):
        check_platform(asked, "cpu")


def test_what_is_recorded_is_said():
    assert not any("profiler" in line or "memory record" in line for line in check_platform(load_config(SEED), "npu"))
    on = load_config(SEED, ["tools.profile.enable=true", "tools.memory_profile.enable=true"])
    lines = check_platform(on, "npu")
    assert "profiler: ranks [0], traces in ./profiling" in lines
    assert "memory record: ranks [0], in ./memory_snapshot" in lines


def test_what_is_without_effect_is_said_once():
    def idle(platform: str, *overrides: str) -> list[str]:
        lines = check_platform(load_config(SEED, overrides), platform)
        return [line.split(": ")[1] for line in lines if line.startswith("accepted without effect: ")]

    assert idle("npu") == ["trust_remote_code"]
    assert idle("cpu") == ["trust_remote_code", "dataloader_param.pin_memory", "dataloader_param.enable_preload"]
    assert "fsdp_plan.cpu_offload" in idle("cpu", "parallel.fsdp_plan.cpu_offload=true")


def test_an_unknown_platform():
    with pytest.raises(UserError, match="unknown platform 'gpu'"):
        check_platform(load_config(SEED), "gpu")
