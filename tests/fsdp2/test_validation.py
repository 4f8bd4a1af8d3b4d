"""What the file, the model and the number of processes mean together: sizes, plans, sources, and every refusal with its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_models.config.family import family_of
from mm_models.config.fsdp2 import load_config
from mm_models.errors import UserError
from mm_models.fsdp2.validation import RunPlan, plan
from tests.config.fsdp2.kit import SEED
from tests.fsdp2.config_kit import folders, full_config, run_config, tiny_folders
from tests.models import tiny_config

LAYERS, BLOCKS = "model.language_model.layers", "model.visual.blocks"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Tiny folders under the published file's relative paths, which are relative to the working directory."""
    monkeypatch.chdir(tiny_folders(tmp_path))
    return tmp_path


def made(changes: dict | None = None, *, world: int = 1, platform: str = "cpu") -> RunPlan:
    return plan(run_config(changes), world, platform)


def refused(words: str, changes: dict | None = None, *, world: int = 1, platform: str = "cpu") -> str:
    with pytest.raises(UserError) as caught:
        made(changes, world=world, platform=platform)
    assert words in str(caught.value), caught.value
    return str(caught.value)


# --- the whole --------------------------------------------------------------------------------------------------------


def test_the_published_file_on_128_processes(tmp_path, monkeypatch):
    """Unmodified, with the full model: sizes, the 45 layers with experts, and what each choice became."""
    monkeypatch.chdir(folders(tmp_path, full_config()))
    found = plan(load_config(SEED), 128, "npu")
    sizes = found.sizes
    assert (sizes.world, sizes.replicate, sizes.shard) == (128, 1, 128)
    assert (sizes.ep, sizes.ep_fsdp, sizes.ep_replicate) == (16, 8, 1)
    assert found.plans.ep == tuple(f"{LAYERS}.{i}.mlp.experts" for i in range(1, 46))
    assert found.plans.recompute == (
        *(f"{BLOCKS}.{i}" for i in range(24)),
        *(f"{LAYERS}.{i}" for i in range(46)),
    )
    assert found.plans.offload == () and len(found.plans.fsdp) == 24 + 46 + 4
    assert (found.dp, found.global_batch_size, found.num_microbatches) == (128, 128, 1)
    assert (found.source.kind, found.expert_layout, found.loss_type) == ("dcp", "stacked_hf", "default")
    text = "\n".join(found.lines)
    for line in (
        "plugin mindspeed_mm/fsdp/models/glm4_5v: built in, model_id glm4v_moe",
        "layout: 128 processes = replicate 1 · shard 128 (auto: all 128 ranks)",
        "experts: 128 processes = copies 1 · sharded 8 (default) · ep 16",
        "batches: global 128 = micro 1 · accumulation 1 · 128 ranks; loss default",
        "attention: model.attn_implementation flash_attention_2 is",
        "accepted without effect: trust_remote_code",
        "checkpoints: ./save_dir, every 10000 iterations and the last",
        "  lr: 1.0e-05",
    ):
        assert text.count(line) == 1, line


def test_a_model_json_in_place_of_a_folder(here):
    """The configuration is the same either way."""
    config = json.loads((here / "ckpt/hf_path/GLM-4.5V/config.json").read_text())
    model = family_of(config, "config.json").model_json(config)
    (here / "model.json").write_text(json.dumps(model))
    found = made({"model.model_name_or_path": "model.json"})
    assert found.model == made().model and found.plans == made().plans
    model["text_decoder"]["num_layers"] = 5
    (here / "model.json").write_text(json.dumps(model))
    refused("text_decoder.num_layers is 5 in model.json, 4 in ckpt", {"model.model_name_or_path": "model.json"})


# --- sizes ------------------------------------------------------------------------------------------------------------

SIZES = {
    # (world, fully_shard_parallel_size, expert_parallel_size, expert_fully_shard): (replicate, shard, copies, ep_fsdp, ep)
    (1, "auto", 1, None): (1, 1, 1, 1, 1),
    (1, 1, 1, None): (1, 1, 1, 1, 1),
    (4, "auto", 1, None): (1, 4, 1, 4, 1),
    (4, "auto", 2, None): (1, 4, 1, 2, 2),
    (4, "auto", 4, None): (1, 4, 1, 1, 4),
    (4, "auto", 2, 1): (1, 4, 2, 1, 2),
    (4, 2, 1, None): (2, 2, 2, 2, 1),
    (4, 2, 2, None): (2, 2, 2, 1, 2),
    (4, 2, 2, 2): (2, 2, 1, 2, 2),
    (4, 1, 1, None): (4, 1, 4, 1, 1),
    (8, 4, 8, None): (2, 4, 1, 1, 8),
    (16, "auto", 8, None): (1, 16, 1, 2, 8),
}


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_every_layout_the_world_allows(here, case):
    world, shard, ep, ep_fsdp = case
    found = made(
        {
            "parallel.fully_shard_parallel_size": shard,
            "parallel.expert_parallel_size": ep,
            "parallel.expert_fully_shard_parallel_size": ep_fsdp,
        },
        world=world,
    ).sizes
    assert (found.replicate, found.shard, found.ep_replicate, found.ep_fsdp, found.ep) == SIZES[case]


def test_sizes_that_do_not_divide(here):
    """B67: the numbers and what would work, before any process group exists."""
    ep, shard, experts = (
        "parallel.expert_parallel_size",
        "parallel.fully_shard_parallel_size",
        "parallel.expert_fully_shard_parallel_size",
    )
    refused(
        "parallel.fully_shard_parallel_size is 3, but it must divide the world size: 4. Possible: [1, 2, 4]",
        {shard: 3},
        world=4,
    )
    refused("parallel.expert_parallel_size is 3, but it must divide the world size: 4", {ep: 3}, world=4)
    refused("8 experts do not divide by 3. Possible on 6 processes: [1, 2]", {ep: 3}, world=6)
    refused("8 experts do not divide by 16. Possible on 16 processes: [1, 2, 4, 8]", {ep: 16}, world=16)
    refused(
        f"{experts} is 4, but it must divide the world size / expert_parallel_size 2: 2", {ep: 2, experts: 4}, world=4
    )
    text = refused("dimension 1 does not divide by the 5 ranks", world=5)
    assert "experts.gate_up_proj (8, 96, 64)" in text and "one of [1]" in text
    refused("one of [1, 2, 4, 8, 16, 32]", world=64)
    refused(
        "data_parallel_size: got 2, but every process sees its own samples: 4 processes make it 4",
        {"parallel.data_parallel_size": 2},
        world=4,
    )
    assert made({"parallel.data_parallel_size": 4}, world=4).dp == 4


@pytest.mark.parametrize(
    ("key", "value", "got"),
    [
        ("parallel.expert_parallel_size", 2, "2"),
        ("model.expert_layout", "stacked", "stacked"),
        ("features.loss_cfg.router_aux_loss_coef", 0.1, "0.1"),
    ],
)
def test_what_asks_for_experts_of_a_dense_model_is_refused(here, key, value, got):
    """B67: refused, not ignored."""
    folder = here / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2_5_vl").to_dict()))
    changes = {
        "model.model_id": "qwen2_5_vl",
        "model.model_name_or_path": "hf",
        "data.dataset_param.preprocess_parameters.model_name_or_path": "hf",
        "training.load": None,
        "training.from_scratch": True,
        key: value,
    }
    refused(f"{key}: got {got}, but the model has no experts. Leave it out.", changes, world=2)


def test_batches(here):
    found = made({"training.micro_batch_size": 3, "training.gradient_accumulation_steps": 2}, world=4)
    assert found.global_batch_size == 24 and found.num_microbatches == 2
    assert "batches: global 24 = micro 3 · accumulation 2 · 4 ranks; loss default" in found.lines


# --- plans ------------------------------------------------------------------------------------------------------------


def test_plans_are_names_in_the_order_of_the_model(here):
    plans = made().plans
    assert plans.fsdp == (
        "model.visual", f"{BLOCKS}.0", f"{BLOCKS}.1", "model.language_model", "model.language_model.embed_tokens",
        *(f"{LAYERS}.{i}" for i in range(4)), "lm_head",
    )  # fmt: skip
    assert plans.ep == tuple(f"{LAYERS}.{i}.mlp.experts" for i in (1, 2, 3))
    assert plans.freeze == () and plans.ignored == ()


def test_experts_may_stand_in_fsdp_plan_too(here):
    """X15: both published forms; 3 of 4 layers have experts and the pattern is alive."""
    both = [*run_config().parallel.fsdp_plan.apply_modules, f"{LAYERS}.{{*}}.mlp.experts"]
    plans = made({"parallel.fsdp_plan.apply_modules": both}).plans
    assert set(plans.ep) < set(plans.fsdp)


def test_a_plan_that_is_off_is_checked_and_then_empty(here):
    assert made({"features.recompute": False}).plans.recompute == ()
    assert made({"features.enable_activation_offload": True}).plans.offload == (
        f"{BLOCKS}.0", f"{BLOCKS}.1", *(f"{LAYERS}.{i}" for i in range(4)),
    )  # fmt: skip
    for key in ("features.recompute_plan.apply_modules", "features.activation_offload_plan.apply_modules"):
        refused(
            f"{key}: 'model.visual.block.{{*}}' matches nothing. Nearest: 'model.visual.blocks.{{*}}'",
            {"features.recompute": False, key: ["model.visual.block.{*}"]},
        )


def test_wrong_names_in_every_plan(here):
    """A dead pattern, a doubled one, an index that is not there, names that cannot be what the plan is about."""
    fsdp, ep = "parallel.fsdp_plan.apply_modules", "parallel.ep_plan.apply_modules"
    refused(f"{fsdp}: 'model.visula' matches nothing. Nearest: 'model.visual'", {fsdp: ["model.visula"]})
    refused(f"'{LAYERS}.{{*}}'", {fsdp: [f"{LAYERS}.{{0}}", f"{LAYERS}.{{*}}"]})
    refused("goes to index 45, the last one there is 3", {fsdp: [f"{LAYERS}.{{0-45}}"]})
    refused("has no parameters", {fsdp: ["model.language_model.rotary_emb"]})
    refused("is in apply_modules and in ignored_modules", {"parallel.fsdp_plan.ignored_modules": ["lm_head"]})
    refused("matches nothing", {"parallel.fsdp_plan.ignored_modules": ["lmhead"]})
    refused(
        f"{LAYERS}.0.mlp holds no stacked experts",
        {ep: [f"{LAYERS}.{{*}}.mlp"]},
    )
    refused(f"Name modules such as {LAYERS}.1.mlp.experts", {ep: ["lm_head"]})


def test_tools_are_judged_for_the_platform(here, monkeypatch):
    """E19: only what is enabled; ranks must exist; an environment that contradicts determinism is refused."""
    on = {"tools.profile.enable": True}
    refused("tools.profile.static_param.level=null", on)
    plain = {**on, "tools.profile.static_param.level": None}
    assert "profiler: ranks [0], traces in ./profiling" in made(plain).lines
    assert made(on, platform="npu") and made()
    refused("rank 4 of [4] does not exist; there are 2", {**plain, "tools.profile.ranks": [4]}, world=2)
    assert made({**plain, "tools.profile.ranks": [-1]}, world=2)
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    refused("HCCL_DETERMINISTIC", {"training.use_deter_comp": True}, platform="npu")
    assert made({"training.use_deter_comp": True})


def test_freezing(here):
    """B37: modules or parameters; what is frozen is listed; nothing idle, and never everything."""
    merger = made({"model.freeze": ["model.visual.merger", "lm_head.weight"]})
    assert merger.plans.freeze[-1] == "lm_head.weight" and len(merger.plans.freeze) > 3
    assert all(name.startswith("model.visual.merger.") for name in merger.plans.freeze[:-1])
    assert any(
        line.startswith(f"plan: {len(merger.plans.freeze)} of {merger.plans.parameters} parameters frozen: ")
        for line in merger.lines
    )
    assert "plan: 0 of" in "\n".join(made().lines)
    refused("model.freeze: every parameter is frozen", {"model.freeze": ["model", "lm_head"]})
    refused("model.freeze: 'model.visual.mergers' matches nothing", {"model.freeze": ["model.visual.mergers"]})
    refused("names modules without parameters", {"model.freeze": ["model.language_model.rotary_emb"]})


def test_a_tied_head_is_frozen_with_the_embedding(tmp_path, monkeypatch):
    """Both names stand for the one parameter."""
    monkeypatch.chdir(tiny_folders(tmp_path, tie_word_embeddings=True))
    for name in ("lm_head", "lm_head.weight", "model.language_model.embed_tokens"):
        assert made({"model.freeze": [name]}).plans.freeze == ("model.language_model.embed_tokens.weight",)


# --- loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_is_what_the_model_can_have(here):
    refused(
        "router_aux_loss_coef: got 0.01; this model balances its experts by e_score_correction_bias",
        {"features.loss_cfg.router_aux_loss_coef": 0.01},
    )
    refused(
        "chunkloss_plan.apply_module: got 'model.lm_head', but the loss is computed in the head. Set it to lm_head",
        {"features.chunkloss_plan.apply_module": "model.lm_head"},
    )
    raw = made({"features.loss_cfg.loss_type": "raw", "features.enable_chunk_loss": False})
    assert raw.loss_type == "raw"


# --- ids and environment ----------------------------------------------------------------------------------------------


def test_ids_are_looked_up_before_anything_is_built(here):
    refused("unknown id 'glm4v_mo' in table 'models'; did you mean 'glm4v_moe'?", {"model.model_id": "glm4v_mo"})
    basic, loader = "data.dataset_param.basic_parameters", "data.dataloader_param"
    refused("basic_parameters.template 'glm4vmoe'; did you mean 'glm4v_moe'?", {f"{basic}.template": "glm4vmoe"})
    refused("collator_id 'qwen3_vl'; did you mean 'qwen3vl'?", {f"{loader}.collate_param.collator_id": "qwen3_vl"})
    refused(
        "dataset_type 'hugging_face'; did you mean 'huggingface'?", {"data.dataset_param.dataset_type": "hugging_face"}
    )
    refused("dataset './data/none.json': no such file", {f"{basic}.dataset": "./data/none.json"})


def test_platform_and_environment_are_said(here, monkeypatch):
    monkeypatch.setenv("NON_MEGATRON", "true")
    lines = made().lines
    assert [line for line in lines if "NON_MEGATRON" in line] == [
        "environment: NON_MEGATRON=true is without effect, this target never loads megatron"
    ]
    monkeypatch.delenv("NON_MEGATRON")
    assert not any("NON_MEGATRON" in line for line in made().lines)
    assert "checkpoints: none, training.save is null" in made({"training.save": None}).lines
    refused("Runs: model.attn_implementation=sdpa", {"model.attn_implementation": "eager"})


def test_the_debug_file_on_one_process(tmp_path, monkeypatch):
    """E21: every size 1, `ep_plan` and `fsdp_plan` left in: they are resolved and kept."""
    monkeypatch.chdir(tiny_folders(tmp_path))
    (tmp_path / "build/quickstart").mkdir(parents=True)
    for old, new in {"ckpt/hf_path/GLM-4.5V": "hf", "ckpt/mm_path/GLM-4.5V": "dcp", "data": "data"}.items():
        (tmp_path / old).rename(tmp_path / "build/quickstart" / new)
    (tmp_path / "build/quickstart/data/train.json").write_text("[]")
    found = plan(load_config(SEED.with_name("glm4_5v_debug.yaml")), 1, "cpu")
    assert (found.sizes.shard, found.sizes.ep, found.sizes.ep_fsdp, found.global_batch_size) == (1, 1, 1, 1)
    assert len(found.plans.ep) == 3 and found.plans.fsdp and found.source.kind == "dcp"
