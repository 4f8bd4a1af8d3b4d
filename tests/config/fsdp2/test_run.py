"""The YAML of a run: the published file validates, everything else is refused by key, overrides and the resolved configuration."""

from __future__ import annotations

import pytest
import yaml

from mm_models.config.fsdp2 import RunConfig, load_config, resolved
from mm_models.config.strict import dotted_keys
from mm_models.errors import UserError
from tests.config.fsdp2.kit import SEED, changed

# --- the published file -------------------------------------------------------------------------------------------------


def test_the_published_file_validates_unmodified():
    config = load_config(SEED)
    assert config.training.lr == 1e-5 and type(config.training.lr) is float
    assert config.training.load == config.model.model_name_or_path == "./ckpt/mm_path/GLM-4.5V"
    assert config.parallel.fully_shard_parallel_size == "auto" and config.parallel.expert_parallel_size == 16
    assert config.features.recompute and config.features.chunkloss_plan.chunk_size == 1024
    assert config.training.plugin[0] == "mindspeed_mm/fsdp/models/glm4_5v"
    assert config.data.dataset_param.basic_parameters.template == "glm4v_moe"
    assert config.tools.profile.static_param.level == "level1"
    assert config.training.weight_decay == 0.0 and config.training.clip_grad == 0.0


def test_a_section_that_is_off_is_checked_and_kept():
    """X2: no key of the published file is refused for having no effect, yet none of them may be wrong."""
    config = load_config(SEED)
    assert config.features.activation_offload_plan.apply_modules and not config.features.enable_activation_offload
    for section, wrong in {
        "features.activation_offload_plan.apply_modules": '["model.visual.blocks.{}"]',
        "features.ep_balance_plan.max_dup_experts_num": "0",
        "features.chunkloss_plan.total_chunk_size": "-1",
        "tools.profile.static_param.end_step": "10",
        "tools.memory_profile.stacks": "python2",
        "parallel.ep_plan.dispatcher": "mc2",
    }.items():
        with pytest.raises(UserError, match=section.rsplit(".", 1)[0]):
            load_config(SEED, [f"{section}={wrong}"])


# --- B69 ------------------------------------------------------------------------------------------------------------------

WRONG = {
    # what: (text of the file, its replacement, words)
    "a typo": ("lr: 1.0e-5", "learning_rat: 1.0e-5", "unknown key 'training.learning_rat'"),
    "a typo of one letter": ("load_strict: true", "load_stict: true", "'training.load_stict', did you mean 'load_strict'?"),
    "a section's typo": ("tools:", "tool:", "unknown key 'tool', did you mean 'tools'?"),
    "a dash": ("micro_batch_size: 1", "micro-batch-size: 1", "did you mean 'micro_batch_size'?"),
    "another case": ("save_interval:", "Save_Interval:", "did you mean 'save_interval'?"),
    "a section's case": ("parallel:", "Parallel:", "unknown key 'Parallel', did you mean 'parallel'?"),
    "the wrong section": ("seed: 1234", "seed: 1234\n  recompute: true", "'recompute' belongs at 'features.recompute'"),
    "the wrong depth": ("  clip_grad: 0.0\n", "  param_dtype: bf16\n", "belongs at 'parallel.fsdp_plan.param_dtype'"),
    "a typo in a plan": ("param_dtype", "parm_dtype", "'parallel.fsdp_plan.parm_dtype', did you mean 'param_dtype'?"),
    "a typo in data": ("cutoff_len", "cut_off_len", "did you mean 'cutoff_len'?"),
    "a key twice": ("seed: 1234", "seed: 1234\n  seed: 4321", "key 'training.seed' is given twice"),
    "text for a boolean": ("adam_fused: true", 'adam_fused: "true"', "training.adam_fused"),
    "a number for a boolean": ("adam_fused: true", "adam_fused: 1", "training.adam_fused"),
    "null for a boolean": ("adam_fused: true", "adam_fused: null", "training.adam_fused"),
    "null for a number": ("train_iters: 10000", "train_iters:", "training.train_iters"),
    "a fraction for a count": ("micro_batch_size: 1", "micro_batch_size: 1.5", "training.micro_batch_size"),
    "an exponent for a count": ("train_iters: 10000", "train_iters: 1e4", "training.train_iters"),
    "a boolean for a count": ("seed: 1234", "seed: true", "training.seed"),
    "zero for a count": ("micro_batch_size: 1", "micro_batch_size: 0", "training.micro_batch_size"),
    "text for a list": ("ranks: [0]", "ranks: 0", "tools.profile.ranks"),
    "an empty list": ("ranks: [0]", "ranks: []", "tools.profile.ranks"),
    "a list for text": ("load_format: dcp", "load_format: [dcp]", "training.load_format"),
    "a section that is a list": ("memory_profile:\n    enable: false", "memory_profile: []", "tools.memory_profile"),
    "a section that is null": ("memory_profile:\n    enable: false", "memory_profile:", "tools.memory_profile"),
    "a choice of another case": ("lr_decay_style: cosine", "lr_decay_style: Cosine", "'constant', 'linear' or 'cosine'"),
    "a choice that is not there": ("loss_type: default", "loss_type: per_token", "features.loss_cfg.loss_type"),
    "half precision": ("param_dtype: bf16", "param_dtype: fp16", "'bf16' or 'fp32'"),
    "a missing key": ("model_id: glm4v_moe\n", "\n", "model.model_id: Field required"),
    "a key of another file": ("dispatcher: alltoall", "use_npu_fused_moe: true", "parallel.ep_plan.use_npu_fused_ops"),
    "a key of another file elsewhere": ("seed: 1234", "use_npu_fused_moe: true", "parallel.ep_plan.use_npu_fused_ops"),
    "an empty pattern": ("model.visual.blocks.{*}\n      - model.language_model\n", "model.visual.blocks.{}\n", r"write '{*}'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_the_file_is_closed(tmp_path, what):
    """B69: every kind of wrong key and wrong type: the file, the key and the nearest valid key or where it belongs."""
    old, new, words = WRONG[what]
    text = SEED.read_text()
    assert old in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert words in str(caught.value) and str(path) in str(caught.value), caught.value
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path):
    """B69: missing, empty, a list: the file is named, and nothing is taken for an empty configuration."""
    with pytest.raises(UserError, match=r"conf\.yaml: no such file"):
        load_config(tmp_path / "conf.yaml")
    for text, words in {"": "empty", "- parallel\n": "expected a mapping", "parallel\n": "expected a mapping"}.items():
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(UserError, match=words):
            load_config(tmp_path / "c.yaml")


# --- B70 ------------------------------------------------------------------------------------------------------------------

NUMBERS = {"1e-5": 1e-5, "1.0e-5": 1e-5, "1E-5": 1e-5, "1e-05": 1e-5, ".00001": 1e-5, "1": 1.0}
PLACES = ("training.lr", "training.weight_decay", "training.adam_eps", "training.clip_grad")
NO_NUMBERS = {
    '"1e-5"': "got '1e-5'",
    "on": "write true",
    "off": "write false",
    "true": "got True",
    "012": "leading zero",
    "1_000": "underscores",
    "null": "got None",
    "1e": "got '1e'",
    "1,5": "got '1,5'",
    "[1]": "valid number",
    ".inf": "finite",
    "-1e-5": "greater than",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_number_is_a_float_however_it_is_written(tmp_path, place):
    """B70: in the file and on the command line the same; what is no number names the key."""
    section, key = place.split(".")
    old = {"lr": "lr: 1.0e-5", "weight_decay": "weight_decay: 0", "clip_grad": "clip_grad: 0.0"}.get(key, "seed: 1234")
    for word, number in NUMBERS.items():
        file = changed(tmp_path, old, f"{key}: {word}")
        for config in (load_config(file), load_config(SEED, [f"{place}={word}"])):
            value = getattr(getattr(config, section), key)
            assert value == number and type(value) is float
    assert load_config(SEED, ["training.lr=1e5"]).training.lr == 100000.0
    for word, words in NO_NUMBERS.items():
        file = changed(tmp_path, old, f"{key}: {word}")
        for path, overrides in ((file, []), (SEED, [f"{place}={word}"])):
            with pytest.raises(UserError) as caught:
                load_config(path, overrides)
            assert place in str(caught.value) and words in str(caught.value), caught.value


# --- what would not happen ------------------------------------------------------------------------------------------------

REFUSED = {
    "parallel.ring_attention_size=2": "parallel.ring_attention_size: ring attention is not there yet; the only accepted value is 1",
    "parallel.ulysses_parallel_size=2": "parallel.ulysses_parallel_size",
    "parallel.tensor_parallel_size=2": "pretrain_vlm.py",
    "parallel.fully_shard_parallel_size=0": "expected auto or a whole number",
    "parallel.fully_shard_parallel_size=Auto": "expected auto or a whole number",
    "parallel.fully_shard_parallel_size=true": "expected auto or a whole number",
    "parallel.fsdp_plan.cast_forward_inputs=true": "parallel.fsdp_plan.cast_forward_inputs",
    "parallel.ep_plan.dispatcher=mc2": "parallel.ep_plan.dispatcher",
    "parallel.ep_plan.apply_modules=[]": "expert_parallel_size 16 with an empty ep_plan.apply_modules",
    "features.enable_ep_balance=true": "features.enable_ep_balance",
    "features.enable_dynamic_chunk_loss=true": "enable_chunk_loss and enable_dynamic_chunk_loss exclude each other",
    "features.loss_cfg.loss_type=raw": "raw is Hugging Face's own loss and cannot be cut into chunks",
    "features.recompute_plan.apply_modules=[]": "recompute is true and recompute_plan.apply_modules is empty",
    "training.optimizer=muon": "only AdamW",
    "training.load=null": "no weights to start from",
    "training.from_scratch=true": "contradict each other",
    "training.load_strict=false": "needs allow_missing",
    "training.allow_missing=[lm_head.weight]": "no effect while load_strict is true",
    "training.lr_min=1.0": "lr_min 1.0 exceeds lr",
    "training.lr_warmup_ratio=1.0": "does not end before the decay",
    "data.dataset_param.basic_parameters.packing=true": "packing",
    "data.dataset_param.basic_parameters.preprocessing_num_workers=-1": "preprocessing_num_workers",
    "tools.profile.profile_type=dynamic": "fixed steps",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_would_not_happen_is_refused_by_name(override):
    with pytest.raises(UserError) as caught:
        load_config(SEED, [override])
    assert REFUSED[override] in str(caught.value), caught.value


def test_starts_and_ends_that_are_fine():
    for fine in ("training.save=null", "training.save_async=true", "training.no_save_optim=true"):
        assert load_config(SEED, [fine])
    assert load_config(SEED, ["training.load=null", "training.from_scratch=true"]).training.from_scratch
    assert load_config(SEED, ["training.load=", "training.init_model_with_meta_device=false"]).training.load is None
    loose = load_config(SEED, ["training.load_strict=false", 'training.allow_missing=["model.visual.*"]'])
    assert loose.training.allow_missing == ["model.visual.*"]
    with pytest.raises(UserError, match="save_async, keep_last without save"):
        load_config(SEED, ["training.save=null", "training.save_async=true", "training.keep_last=2"])


# --- overrides ------------------------------------------------------------------------------------------------------------


def test_overrides_win_and_are_yaml():
    config = load_config(
        SEED,
        [
            "training.lr=1e-4",
            "training.save=null",
            "training.tensorboard_dir=./a=b",
            "tools.profile.ranks=[0, 3]",
            'model.freeze=["model.visual.blocks.{*}"]',
            "parallel.fsdp_plan={param_dtype: fp32}",
            "parallel.data_parallel_size=4",
            "training.use_deter_comp=true",
        ],
    )
    assert config.training.lr == 1e-4 and config.training.save is None and config.training.use_deter_comp is True
    assert config.training.tensorboard_dir == "./a=b" and config.tools.profile.ranks == [0, 3]
    assert config.model.freeze == ["model.visual.blocks.{*}"] and config.parallel.data_parallel_size == 4
    assert config.parallel.fsdp_plan.param_dtype == "fp32" and config.parallel.fsdp_plan.apply_modules == []
    assert load_config(SEED).training.lr == 1e-5


OVERRIDES = {
    "training.lrr=1": "unknown key 'training.lrr', did you mean 'lr'?",
    "trainin.lr=1": "unknown key 'trainin', did you mean 'training'?",
    "training.recompute=true": "'recompute' belongs at 'features.recompute'",
    "lr=1": "'lr' belongs at 'training.lr'",
    "training.lr.x=1": "unknown key 'training.lr.x'",
    "training.lr": "expected section.key=value",
    "=1": "expected section.key=value",
    "training.=1": "unknown key 'training.'",
    "training.lr=[1": "training.lr: not valid YAML, line 1",
    "parallel.ep_plan.apply_modules=[a.{*}]": "A pattern in a list needs quotes",
    "training.lr=1e-4 training.lr=1e-5": "training.lr is given twice",
    "training.use_deter_comp=yes": "training.use_deter_comp, line 1: got yes; ",
}


@pytest.mark.parametrize("words", OVERRIDES)
def test_overrides_that_are_wrong(words):
    with pytest.raises(UserError) as caught:
        load_config(SEED, words.split(" "))
    assert OVERRIDES[words] in str(caught.value), caught.value
    assert "command line" in str(caught.value)


def test_an_override_cannot_hang_below_a_word(tmp_path):
    """A section that the file leaves out is made; one that is no mapping is refused."""
    with pytest.raises(UserError, match=r"tools\.profile\.enable cannot be set, the file has 3 at tools"):
        load_config(changed(tmp_path, "tools:\n  profile:", "tools: 3\nx:\n  profile:"), ["tools.profile.enable=true"])
    path = tmp_path / "short.yaml"
    path.write_text(SEED.read_text().split("tools:")[0])
    assert load_config(path, ["tools.memory_profile.enable=true"]).tools.memory_profile.enable


def test_every_key_can_be_overridden_by_its_resolved_value():
    """Each of the schema's keys exists under the name that is printed, and its printed value is accepted on the command line."""
    config = load_config(SEED)
    for key in dotted_keys(RunConfig):
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        if hasattr(value, "model_dump"):
            continue
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        assert load_config(SEED, [f"{key}={text}"]) == config, key


# --- the resolved configuration -------------------------------------------------------------------------------------------


def test_the_resolved_configuration_is_read_back_equal(tmp_path):
    for overrides in (
        [],
        ["training.lr=3e-7", "training.save='on'", "training.log_metrics='1e-5'", "model.freeze=['012']"],
    ):
        config = load_config(SEED, overrides)
        (tmp_path / "resolved.yaml").write_text(resolved(config))
        assert load_config(tmp_path / "resolved.yaml") == config


def test_the_resolved_configuration_holds_every_key():
    text = resolved(load_config(SEED))
    for key in dotted_keys(RunConfig):
        assert f"{key.rsplit('.', 1)[-1]}:" in text, key
