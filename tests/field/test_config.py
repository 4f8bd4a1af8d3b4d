"""Keys and numbers: what nobody reads is refused, a number is a number however it is written, batches and data sets add up."""

from __future__ import annotations

import json

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.config.model import load_model_config
from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.validation import plan
from tests.harness import CaseFailed, run
from tests.mcore import standin
from tests.mcore.training_kit import launch, launch_synthetic, tiny_files, tiny_flags
from tests.models import tiny_glm_config, tiny_model_json

# --- B69 ------------------------------------------------------------------------------------------------------------

TEXT, VISION, PROJECTOR = "text_decoder", "image_encoder.vision_encoder", "image_encoder.vision_projector"
WRONG = {
    # what: (section, key, value, words)
    "a typo at the root": ("", "model_idd", "x", "unknown key 'model_idd', did you mean 'model_id'"),
    "a typo in the decoder": (TEXT, "num_layer", 4, "unknown key 'text_decoder.num_layer', did you mean 'num_layers'"),
    "a typo in the ViT": (VISION, "frezze", True, "did you mean 'freeze'"),
    "a typo in the projector": (PROJECTOR, "hiden_act", "silu", "did you mean 'hidden_act'"),
    "a typo in the loss": ("loss_cfg", "loss_typ", "default", "did you mean 'loss_type'"),
    "a dash": (TEXT, "freeze-vit", True, "unknown key 'text_decoder.freeze-vit'"),
    "a dash for an underscore": (TEXT, "rms-norm-eps", 1e-5, "did you mean 'rms_norm_eps'"),
    "another case": (TEXT, "Num_Layers", 4, "did you mean 'num_layers'"),
    "the wrong section": ("", "num_moe_experts", 8, "belongs at 'text_decoder.num_moe_experts'"),
    "the wrong part": (VISION, "moe_router_topk", 2, "belongs at 'text_decoder.moe_router_topk'"),
    "text for a boolean": (TEXT, "add_qkv_bias", "true", "text_decoder.add_qkv_bias"),
    "a number for a boolean": (TEXT, "norm_topk_prob", 1, "text_decoder.norm_topk_prob"),
    "text for a number": (TEXT, "hidden_size", "64", "text_decoder.hidden_size"),
    "null for a number": (TEXT, "num_layers", None, "text_decoder.num_layers"),
    "a fraction for a count": (VISION, "num_layers", 2.5, "image_encoder.vision_encoder.num_layers"),
    "a boolean for a count": (TEXT, "num_layers", True, "text_decoder.num_layers"),
    "text for freeze": (TEXT, "freeze", "true", "text_decoder.freeze"),
    "a loss of another name": ("loss_cfg", "loss_type", "per_token", "loss_cfg.loss_type"),
    "an activation nobody computes": (TEXT, "activation_func", "gelu", "text_decoder.activation_func"),
}


def at(content: dict, section: str) -> dict:
    for key in section.split(".") if section else ():
        content = content[key]
    return content


@pytest.mark.parametrize("what", WRONG)
def test_model_json_is_closed(tmp_path, what):
    """B69: every kind of wrong key and wrong type in every section: file, key and the nearest valid key."""
    section, key, value, words = WRONG[what]
    content = tiny_model_json(tiny_glm_config(), loss_cfg={"loss_type": "default"})
    at(content, section)[key] = value
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as caught:
        load_model_config(tmp_path / "model.json")
    assert words in str(caught.value) and str(tmp_path / "model.json") in str(caught.value), caught.value


def test_a_key_given_twice_in_model_json(tmp_path):
    """B69: the second does not win, nor the first."""
    text = json.dumps(tiny_model_json(tiny_glm_config())).replace('"num_layers": 4', '"num_layers": 4, "num_layers": 5')
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.json: key 'num_layers' is given twice"):
        load_model_config(tmp_path / "model.json")


def test_an_unknown_component_is_refused_with_the_nearest(tmp_path):
    """B69: a `model_id` that is not registered, before any process starts."""
    argv = [*tiny_flags(tmp_path, "--from-scratch", text_decoder={"model_id": "glm4v_moe_ml"}), "--check"]
    with pytest.raises(CaseFailed, match=r"'glm4v_moe_ml'.*did you mean 'glm4v_moe_lm'"):
        launch_synthetic(1, argv, tmp_path / "m.jsonl")


def test_the_converter_reads_the_same_closed_model_json(tmp_path, capsys):
    """B69: `mm-convert --model` with a typo: status 2, the key named, nothing written."""
    from tests.weights.folders import hf_folder

    hf = hf_folder(tmp_path / "hf")
    content = tiny_model_json(tiny_glm_config(), text_decoder={"num_query_group": 2})
    (tmp_path / "model.json").write_text(json.dumps(content))
    assert (
        main(["hf_to_mm", "--hf", str(hf), "--out", str(tmp_path / "mm"), "--model", str(tmp_path / "model.json")]) == 2
    )
    assert "did you mean 'num_query_groups'" in capsys.readouterr().err and not (tmp_path / "mm").exists()


# --- B70 ------------------------------------------------------------------------------------------------------------

NUMBERS = {
    "1e-5": 1e-5,
    "1.0e-5": 1e-5,
    "1E-5": 1e-5,
    "1e-05": 1e-5,
    ".00001": 1e-5,
    "1e5": 1e5,
    "1E+5": 1e5,
    "012.5": 12.5,
    "2": 2.0,
}
PLACES = {
    "--lr": "lr",
    "--weight-decay": "weight_decay",
    "--adam-eps": "adam_eps",
    "--clip-grad": "clip_grad",
    "--min-lr": "min_lr",
}


@pytest.mark.parametrize("flag", PLACES)
@pytest.mark.parametrize("word", NUMBERS)
def test_a_number_is_a_float_however_it_is_written(flag, word):
    """B70: every spelling in every numeric flag is the same float; Python's and YAML's specialities are refused by flag."""
    flags = (
        standin.BASE
        if flag != "--lr"
        else [w for i, w in enumerate(standin.BASE) if "--lr" not in standin.BASE[max(0, i - 1) : i + 1]]
    )
    value = getattr(parse([*flags, flag, word]), PLACES[flag])
    assert value == NUMBERS[word] and type(value) is float
    for wrong in (
        "on",
        "off",
        "1_000",
        "'1e-5'",
        '"1e-5"',
        "1e-5f",
        "1,5",
        "true",
        "null",
        "~",
        "",
        " 1",
        "0x10",
        "1e",
        "infinity",
    ):
        with pytest.raises(UserError, match=flag):
            parse([*flags, flag, wrong])


def _groups(rank: int, flags: list[str]) -> list[dict]:
    from mm_models.mcore import optimizer, schedule_lr

    standin.start()
    args = standin.arguments(*flags)
    built = optimizer.build(args, [standin.wrap(standin.Network(torch.float32), args)])
    schedule_lr.build(type("Plan", (), {"args": args, "global_batch_size": 4}), built)
    return [{key: group[key] for key in ("lr", "weight_decay", "eps", "wd_mult")} for group in built.param_groups]


def test_the_optimizer_gets_the_numbers(tmp_path):
    """B70: learning rate, decay and eps of the optimizer's groups are those floats; biases and vectors have no decay."""
    (groups,) = run(_groups, 1, ["--weight-decay", "1E-3", "--adam-eps", "1e-7", "--lr-decay-style", "constant"])
    assert {group["lr"] for group in groups} == {0.01} and {group["eps"] for group in groups} == {1e-7}
    assert {(group["wd_mult"], group["weight_decay"]) for group in groups} == {(0.0, 0.0), (1.0, 1e-3)}
    assert all(type(group[key]) is float for group in groups for key in ("lr", "weight_decay", "eps"))


FLOATS = [
    ("rms_norm_eps", 1e-5, True), ("rope_theta", 10000, True), ("rms_norm_eps", "1e-5", False), ("rope_theta", "1e4", False),
    ("rms_norm_eps", 0, False), ("rms_norm_eps", -1e-5, False), ("rope_theta", True, False),
    ("rope_theta", float("inf"), False), ("rms_norm_eps", float("nan"), False),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "fine"), FLOATS)
def test_numbers_in_model_json(tmp_path, key, value, fine):
    """B70: 1e-5 is a number and 10000 is 10000.0; a number as text, a truth value or one below zero is refused by key."""
    content = tiny_model_json(tiny_glm_config(), text_decoder={key: value})
    (tmp_path / "model.json").write_text(json.dumps(content))
    if fine:
        assert getattr(load_model_config(tmp_path / "model.json").text, key) == float(value)
        return
    with pytest.raises(UserError, match=f"text_decoder.{key}"):
        load_model_config(tmp_path / "model.json")


# --- B63 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nprocs", "micro", "batch", "words"),
    [
        (
            2,
            1,
            3,
            "--global-batch-size 3 does not divide by micro-batch size · DP = 1 · 2 = 2 (remainder 1). Possible nearby: 2 or 4",
        ),
        (2, 3, 8, "3 · 2 = 6 (remainder 2). Possible nearby: 6 or 12"),
        (4, 2, 4, "2 · 4 = 8 (remainder 4). Possible nearby: 8"),
    ],
)
def test_batches_that_do_not_divide(tmp_path, nprocs, micro, batch, words):
    """B63: the arithmetic, and what would work."""
    files = tiny_files(tmp_path)
    sizes = ["--micro-batch-size", str(micro), "--global-batch-size", str(batch)]
    argv = [*files, *sizes, "--train-iters", "1", "--lr", "1", "--from-scratch"]
    with pytest.raises(UserError) as caught:
        plan(parse(argv), nprocs)
    assert words in str(caught.value)


def test_fewer_samples_than_a_global_batch_end_a_run(world, tmp_path):
    """B63: fifteen rows cut to three, a global batch of four: both numbers and no step. None at all is refused in data.json."""
    argv = [*world.flags(data=world.data("three", max_samples=3), steps=1, start=None), "--from-scratch"]
    with pytest.raises(CaseFailed, match="3 samples are fewer than one global batch of 4"):
        launch(2, argv, tmp_path / "m.jsonl")
    assert not (tmp_path / "m.jsonl").exists() or not (tmp_path / "m.jsonl").read_text()
    argv = [*world.flags(data=world.data("none", max_samples=0), steps=1, start=None), "--from-scratch"]
    with pytest.raises(UserError, match="max_samples"):
        plan(parse(argv), 2)
