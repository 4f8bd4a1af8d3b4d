"""What a resume refuses, and what it says where it goes on: paths, layouts, models, damage, schedules, changed flags."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.checkpoint import check_source
from mm_models.mcore.validation import plan
from mm_models.train.log import read_metrics
from mm_models.weights.dcp.folder import open_dcp
from mm_models.weights.manifest import open_checkpoint
from tests.harness import CaseFailed
from tests.mcore.test_checkpoint import SCHEDULE
from tests.mcore.test_training import SP, topology
from tests.mcore.training_kit import launch_synthetic, printed, tiny_flags


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with two checkpoints (iterations 2 and 4) of one process, and the flags of the run."""
    folder = tmp_path_factory.mktemp("saved")
    argv = tiny_flags(folder, *SCHEDULE, "--exit-interval", "4", steps=6)
    launch_synthetic(
        1, [*argv, "--from-scratch", "--save", str(folder / "ck"), "--save-interval", "2"], folder / "m.jsonl"
    )
    return folder


def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "ck", tmp_path / "ck")
    return tmp_path / "ck"


def judged(argv: list[str], world: int = 1) -> str:
    """The refusal, from names and manifests alone: no process has started."""
    with pytest.raises(UserError) as caught:
        check_source(plan(parse(argv), world))
    return str(caught.value)


def failed(argv: list[str], tmp_path: Path, nprocs: int = 1) -> str:
    with pytest.raises(CaseFailed) as caught:
        launch_synthetic(nprocs, argv, tmp_path / "m.jsonl")
    assert not (tmp_path / "m.jsonl").exists() or not (tmp_path / "m.jsonl").read_text(), "a step was taken"
    return str(caught.value)


def test_a_wrong_load_path_is_refused_before_anything_starts(saved, tmp_path):
    argv, folder = tiny_flags(tmp_path, steps=6), copy(saved, tmp_path)

    def load(path, *more) -> str:
        message = judged([*argv, "--load", str(path), *more])
        assert str(path) in message
        return message

    assert "Did you mean" in load(tmp_path / "cc")  # a typo
    (tmp_path / "empty").mkdir()
    assert "empty" in load(tmp_path / "empty")
    assert str(folder) in load(tmp_path)  # the parent of the right folder
    assert "iter_0000002" in load(folder, "--ckpt-step", "3")  # a step that is absent: those there are named
    assert "so it is not a checkpoint folder" in load(folder / "iter_0000002" / "mp_rank_00")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert "latest_checkpointed_iteration.txt" in load(folder)


def test_a_checkpoint_of_the_other_target_is_refused_with_the_command(saved, tmp_path):
    """DCP here, also with a config.json beside it, which makes it no Hugging Face folder; ours where DCP is read."""
    (tmp_path / "dcp" / "release").mkdir(parents=True)
    (tmp_path / "dcp" / "release" / ".metadata").touch()
    (tmp_path / "dcp" / "release" / "manifest.json").write_text('{"format": "mm-models dcp"}')
    (tmp_path / "dcp" / "latest_checkpointed_iteration.txt").write_text("release")
    (tmp_path / "dcp" / "config.json").write_text("{}")
    message = judged([*tiny_flags(tmp_path, steps=6), "--load", str(tmp_path / "dcp")])
    assert f"mm-convert dcp_to_mm --dcp {tmp_path / 'dcp'} --out NEW_FOLDER --tp 1" in message
    with pytest.raises(UserError, match=r"a DCP checkpoint, not one of the Megatron target. mm-convert dcp_to_hf"):
        open_checkpoint(tmp_path / "dcp")
    with pytest.raises(UserError, match=r"a checkpoint of the Megatron target, not DCP. mm-convert mm_to_hf"):
        open_dcp(saved / "ck")


def test_another_layout_or_split_names_both_and_the_command(saved, tmp_path):
    load = ["--load", str(saved / "ck")]
    message = judged([*tiny_flags(tmp_path, *topology(pp=2)), *load], world=2)
    assert "pp 1 there, 2 here" in message and "mm-convert resplit" in message and "--pp 2" in message
    message = judged([*tiny_flags(tmp_path, *topology(tp=2), SP), *load], world=2)
    assert "tp 1 there, 2 here" in message
    pp2 = tiny_flags(tmp_path / "pp2", *topology(pp=2), steps=1, text_decoder={"pipeline_num_layers": [1, 3]})
    launch_synthetic(2, [*pp2, "--from-scratch", "--save", str(tmp_path / "two")], tmp_path / "m.jsonl")
    other = tiny_flags(tmp_path / "other", *topology(pp=2), text_decoder={"pipeline_num_layers": [2, 2]})
    message = judged([*other, "--load", str(tmp_path / "two")], world=2)
    assert "[[1, 3]]" in message and "[[2, 2]]" in message and "mm-convert resplit" in message


def test_another_model_is_refused_by_field(saved, tmp_path):
    message = failed(
        tiny_flags(tmp_path, "--load", str(saved / "ck"), steps=6, text_decoder={"rms_norm_eps": 1e-6}), tmp_path
    )
    assert "rms_norm_eps" in message and "1e-06" in message and "1e-05" in message


def test_damage_is_refused_by_file_and_name(saved, tmp_path):
    folder = copy(saved, tmp_path)
    step = folder / "iter_0000004"
    argv = tiny_flags(tmp_path, *SCHEDULE, "--load", str(folder), steps=6)
    for part in ("optimizer", "tensors"):
        entry = getattr(open_checkpoint(folder).manifest, part)[3]
        file = step / entry.file
        before = file.read_bytes()
        file.write_bytes(before[: entry.offset] + bytes([before[entry.offset] ^ 1]) + before[entry.offset + 1 :])
        message = failed(argv, tmp_path)
        assert entry.file in message and entry.name in message, message
        file.write_bytes(before)
    (step / "mp_rank_00" / "optim_dp000.pt").rename(tmp_path / "gone.pt")
    assert "optim_dp000.pt: missing" in judged(argv)


def test_what_is_frozen_may_not_change_silently(saved, tmp_path):
    argv = tiny_flags(tmp_path, *SCHEDULE, "--load", str(saved / "ck"), steps=6, text_decoder={"freeze": ["embedding"]})
    message = failed(argv, tmp_path)
    assert (
        "Saved but not trained here: text_decoder.embedding.word_embeddings.weight" in message
        and "--no-load-optim" in message
    )
    assert len(launch_synthetic(1, [*argv, "--no-load-optim"], tmp_path / "m2.jsonl")) == 2


def test_weights_alone(saved, tmp_path):
    argv = tiny_flags(tmp_path, *SCHEDULE, "--load", str(saved / "ck"), steps=6)
    records = launch_synthetic(1, [*argv, "--finetune"], tmp_path / "a.jsonl")
    assert [r["iteration"] for r in records] == [1, 2, 3, 4, 5, 6] and records[0]["consumed_samples"] == 4
    (said,) = printed(1, [*argv, "--no-load-optim", "--no-load-rng"])
    assert "iteration        5/       6" in said and "iteration 4, 16 samples consumed" in said
    assert "optimizer state not loaded (--no-load-optim)" in said and "random states not loaded (--no-load-rng)" in said


def test_a_checkpoint_without_optimizer_state_says_so(tmp_path):
    argv = tiny_flags(tmp_path, steps=2)
    launch_synthetic(
        1, [*argv, "--from-scratch", "--save", str(tmp_path / "ck"), "--no-save-optim"], tmp_path / "m.jsonl"
    )
    again = tiny_flags(tmp_path, "--load", str(tmp_path / "ck"), steps=3)
    assert "holds no optimizer state" in judged(again) and "--no-load-optim" in judged(again)


def test_nothing_left_to_do_is_an_error(saved, tmp_path):
    message = judged(tiny_flags(tmp_path, *SCHEDULE, "--load", str(saved / "ck"), steps=4))
    assert "iteration 4" in message and "--train-iters is 4" in message


def test_the_schedule_is_never_changed_in_silence(saved, tmp_path):
    """Saved by a run of 6 iterations; going on to 8 stretches the decay."""
    argv = tiny_flags(tmp_path, *SCHEDULE, "--load", str(saved / "ck"), steps=8)
    message = failed(argv, tmp_path)
    assert "lr_decay_steps was 24, is now 32" in message and "--override-opt_param-scheduler" in message
    (said,) = printed(1, [*argv, "--use-checkpoint-opt_param-scheduler", "--log-metrics", str(tmp_path / "a.jsonl")])
    assert "the checkpoint's schedule" in said and "differing: lr_decay_steps" in said
    taken = [r["learning_rate"] for r in read_metrics(tmp_path / "a.jsonl")]
    assert taken[0] == read_metrics(saved / "m.jsonl")[-1]["next_learning_rate"] and taken[-1] == pytest.approx(1e-5)
    (said,) = printed(1, [*argv, "--override-opt_param-scheduler", "--log-metrics", str(tmp_path / "b.jsonl")])
    assert "the command line's schedule" in said
    unbroken = launch_synthetic(1, tiny_flags(tmp_path, *SCHEDULE, "--from-scratch", steps=8), tmp_path / "c.jsonl")
    assert [r["learning_rate"] for r in read_metrics(tmp_path / "b.jsonl")] == [
        r["learning_rate"] for r in unbroken[4:]
    ]


def test_flags_that_changed_are_named(saved, tmp_path):
    argv = tiny_flags(
        tmp_path,
        *SCHEDULE,
        "--load",
        str(saved / "ck"),
        "--ckpt-step",
        "2",
        "--clip-grad",
        "0.5",
        "--exit-interval",
        "3",
        steps=6,
    )
    (said,) = printed(1, argv)
    assert "--clip-grad was 1.0, is 0.5" in said and "iteration        3/       6" in said


def test_another_global_batch_goes_on_from_the_same_sample(saved, tmp_path):
    """A schedule counts samples, so it stretches: to be said with a flag."""
    argv = tiny_flags(tmp_path, *SCHEDULE, "--load", str(saved / "ck"), "--ckpt-step", "2", steps=6, batch=8)
    assert "lr_decay_steps was 24, is now 48" in failed(argv, tmp_path)
    records = launch_synthetic(
        1, [*argv, "--override-opt_param-scheduler", "--exit-interval", "3"], tmp_path / "m2.jsonl"
    )
    assert [(r["iteration"], r["consumed_samples"], r["global_batch_size"]) for r in records] == [(3, 16, 8)]
