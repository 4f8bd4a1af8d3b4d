"""The command line: typed, closed, judged together with model.json and the number of processes, and fast to answer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mm_models.errors import UserError
from mm_models.mcore.arguments import Arguments, option, parse
from mm_models.mcore.validation import plan
from tests.data.kit import BASE
from tests.mcore.oracle import model_config
from tests.mcore.standin import BASE as FLAGS
from tests.models import tiny_glm_config

ROOT = Path(__file__).parents[2]


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse([*FLAGS, *words])
    return str(caught.value)


def test_values_are_typed():
    args = parse([*FLAGS, "--tensor-model-parallel-size", "2", "--min-lr=0", "--bf16", "--plugin", "one", "two.py"])
    assert (args.tensor_model_parallel_size, args.min_lr, args.bf16, args.plugin) == (2, 0.0, True, ("one", "two.py"))
    assert type(args.min_lr) is float and args.global_batch_size is None


@pytest.mark.parametrize("word", ["1e-5", "1.0e-5", "1E-5", "0.00001", "+1e-5"])
def test_learning_rate_is_a_float_however_it_is_written(word):
    assert parse([*FLAGS[: FLAGS.index("--lr")], "--lr", word]).lr == 1e-5


@pytest.mark.parametrize(
    "name, word",
    [("--lr", "on"), ("--lr", "nan"), ("--lr", "inf"), ("--lr", "1_000"), ("--lr", "-1"), ("--lr", ""), ("--weight-decay", "null"),
     ("--adam-eps", "true"), ("--clip-grad", "0x1"), ("--train-iters", "012"), ("--train-iters", "1_000"), ("--train-iters", "1e3"),
     ("--train-iters", "0"), ("--seed", "1.0"), ("--seed", "yes")],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_flag(name, word):
    flags = list(FLAGS)
    if name in flags:
        at = flags.index(name)
        del flags[at : at + 2]
    with pytest.raises(UserError) as caught:
        parse([*flags, name, word])
    assert name in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("--learning-rat", "--lr"),
        ("--learning_rate", "--lr"),
        ("--micro_batch_size", "--micro-batch-size"),
        ("--Micro-Batch-Size", "--micro-batch-size"),
        ("--global-batch", "--global-batch-size"),
        ("--tensor-model-parallel", "--tensor-model-parallel-size"),
        ("--bf-16", "--bf16"),
        ("--save-intervall", "--save-interval"),
        ("--no-load-optimizer", "--no-load-optim"),
        ("--batch-size", "--micro-batch-size"),
    ],
)
def test_an_unknown_flag_names_the_nearest(typed, meant):
    message = refused(typed, "2")
    assert repr(typed) in message and f"did you mean {meant!r}" in message


def test_no_abbreviation_no_repetition_no_stray_word_nothing_missing():
    assert "--train-iter" in refused("--train-iter", "3")
    assert "--lr is given twice" in refused("--lr", "2")
    assert "--seed is given twice" in refused("--seed=1", "--seed", "2")
    assert "stray" in refused("--seed", "1", "stray")
    assert "expected one argument" in refused("--seed")
    assert "'freeze-vit'" in refused("freeze-vit") or "freeze-vit" in refused("freeze-vit")
    with pytest.raises(UserError, match=r"--mm-model.*--train-iters"):
        parse([])


def test_choices_are_listed():
    message = refused("--lr-decay-style", "Cosine")
    assert "'Cosine'" in message and all(word in message for word in ("constant", "linear", "cosine"))


def test_flags_have_megatrons_spelling():
    names = {option(f.name) for f in dataclasses.fields(Arguments)}
    assert {
        "--tensor-model-parallel-size",
        "--use-distributed-optimizer",
        "--override-opt_param-scheduler",
        "--no-load-rng",
        "--clip-grad",
    } <= names


def test_help_answers_at_once_and_imports_nothing_heavy():
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "pretrain_vlm.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "--mm-model" in done.stdout
    assert time.perf_counter() - began < 5  # under load; alone it is 0.2 s
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "megatron", "pydantic", "numpy"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "model.json").write_text(model_config(tiny_glm_config()).model_dump_json(exclude_none=True))
    (folder / "data.json").write_text(BASE)
    return folder


def judge(
    files: Path, *words: str, world: int = 1, start: tuple[str, ...] = ("--from-scratch",), device: str = "cpu", **model
):
    path = files / "model.json"
    if model:
        data = json.loads(path.read_text())
        data["text_decoder"] |= model
        path = files / "changed.json"
        path.write_text(json.dumps(data))
    flags = [
        "--mm-model",
        str(path),
        "--mm-data",
        str(files / "data.json"),
        "--micro-batch-size",
        "2",
        "--train-iters",
        "10",
        "--lr",
        "1e-3",
    ]
    return plan(parse([*flags, *start, *words]), world, device=device)


def judged(files: Path, *words: str, **how) -> str:
    with pytest.raises(UserError) as caught:
        judge(files, *words, **how)
    return str(caught.value)


TP, PP, VPP, EP, ETP, GBS, SP = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--virtual-pipeline-model-parallel-size",
    "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--global-batch-size", "--sequence-parallel",
)  # fmt: skip


def test_batch_arithmetic(files):
    run = judge(files, GBS, "12", world=2)
    assert (run.layout.dp, run.num_microbatches, run.global_batch_size) == (2, 3, 12)
    assert judge(files, world=3).num_microbatches == 1
    message = judged(files, GBS, "10", world=2)
    assert all(word in message for word in ("10", "2 · 2 = 4", "remainder 2", "8 or 12"))


@pytest.mark.parametrize("count, fine", [(1, False), (2, True), (3, False), (4, True), (5, False)])
def test_the_interleaved_schedule_takes_multiples_of_pp(files, count, fine):
    flags = [PP, "2", VPP, "2", GBS, str(2 * count)]
    if fine:
        assert judge(files, *flags, world=2).num_microbatches == count
        return
    message = judged(files, *flags, world=2)
    assert (
        f"got {count} = global batch size {2 * count} / (micro-batch size 2 · DP 1)" in message
        and "PP 2" in message
        and GBS in message
    )


@pytest.mark.parametrize(
    "words, world, expected",
    [
        ([TP, "2"], 2, ["--tensor-model-parallel-size 2", "8 experts", "Add --sequence-parallel"]),
        ([SP], 1, ["--sequence-parallel", "TP is 1"]),
        (["--context-parallel-size", "2"], 2, ["--context-parallel-size 2", "not there yet"]),
        ([TP, "2", SP], 3, ["3 processes", "multiple of 2"]),
        ([TP, "4", SP], 4, ["num_query_groups (kv heads) 2 does not divide by tp 4"]),
        ([EP, "2"], 1, ["ep·etp = 2·1 = 2 must divide tp·cp·dp = 1·1·1"]),
        ([EP, "2", ETP, "2"], 2, ["ep·etp = 2·2 = 4 must divide"]),
        ([EP, "3"], 3, ["num_moe_experts 8 does not divide by ep 3"]),
        ([VPP, "2"], 1, ["vpp 2 needs pp"]),
        (["--lr-warmup-iters", "10"], 1, ["warm-up of 10 iterations", "decay of 10"]),
        (["--lr-warmup-iters", "1", "--lr-warmup-fraction", "0.1"], 1, ["--lr-warmup-iters and --lr-warmup-fraction"]),
        (["--min-lr", "1"], 1, ["--min-lr 1.0 exceeds --lr 0.001"]),
        (["--adam-beta2", "1"], 1, ["--adam-beta2", "less than 1"]),
        (["--recompute-granularity", "full"], 1, ["--recompute-method"]),
        (["--recompute-method", "block"], 1, ["--recompute-granularity full"]),
        (["--no-load-optim", "--no-load-rng"], 1, ["--no-load-optim, --no-load-rng without --load"]),
        (["--save-interval", "2"], 1, ["--save-interval without --save"]),
        (
            ["--use-flash-attn", "--use-fused-rmsnorm"],
            1,
            ["--use-fused-rmsnorm, --use-flash-attn", "causal_attention, rms_norm", "cpu"],
        ),
        (["--use-fused-swiglu"], 1, ["swiglu"]),
        (["--use-fused-rotary-pos-emb"], 1, ["rotary"]),
    ],
)
def test_values_that_do_not_fit_together(files, words, world, expected):
    message = judged(files, *words, world=world)
    assert all(word in message for word in expected), message


def test_a_start_must_be_named(files):
    assert "--from-scratch" in judged(files, start=())
    assert "contradict" in judged(files, start=("--from-scratch", "--load", "x"))
    both = ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
    assert all(flag in judged(files, *both, start=("--load", "x")) for flag in both)


def test_stage_splits_of_model_json(files):
    assert judge(files, PP, "2", GBS, "4", world=2, pipeline_num_layers=[1, 3]).split.text.flat == (1, 3)
    assert "sums to 5, the model has 4" in judged(files, PP, "2", world=2, pipeline_num_layers=[2, 3])
    assert "length 3, expected 2" in judged(files, PP, "2", world=2, pipeline_num_layers=[1, 1, 2])


def test_workers_of_data_json_or_of_the_flag(files):
    assert judge(files).data.dataloader_param.num_workers == 0
    assert judge(files, "--num-workers", "3").data.dataloader_param.num_workers == 3


def test_files_are_closed_too(files):
    data = json.loads((files / "model.json").read_text())
    data["text_decoder"]["num_layer"] = 4
    (files / "typo.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"num_layer.*num_layers"):
        plan(parse([*[w if w != "model.json" else str(files / "typo.json") for w in FLAGS]]), 1)


def test_names_of_data_json_are_known_before_a_run(files):
    data = json.loads(BASE)
    data["dataset_param"]["basic_parameters"]["template"] = "glm4v_mo"
    (files / "misspelt.json").write_text(json.dumps(data))
    flags = ["--mm-model", str(files / "model.json"), "--mm-data", str(files / "misspelt.json")]
    with pytest.raises(UserError, match=r"basic_parameters.template 'glm4v_mo'; did you mean 'glm4v_moe'"):
        plan(parse([*flags, "--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3", "--from-scratch"]), 1)
