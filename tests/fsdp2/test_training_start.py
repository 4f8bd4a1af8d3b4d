"""Where weights come from: a Hugging Face folder, DCP, rank 0 for all, the seed; and what a run says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_models.train.log import read_metrics
from tests.fsdp2.test_checkpoint import exact
from tests.fsdp2.trainer_kit import BF16, Synthetic, Uneven, changed, config, launch, printed, stock, train, write_hf
from tests.harness import CaseFailed, run
from tests.mcore.training_kit import launch_synthetic, tiny_flags

EP2 = {"parallel.expert_parallel_size": 2}


@pytest.fixture(scope="session")
def hf(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "hf")


def _without(hf: Path, folder: Path, *names: str) -> Path:
    """A copy of the Hugging Face folder that lacks tensors."""
    folder.mkdir()
    for file in hf.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    save_file({k: v for k, v in state.items() if k not in names}, file, metadata={"format": "pt"})
    return folder


# --- rank 0 reads for all -----------------------------------------------------------------------------------------------


def _only_rank_zero_reads(rank: int, raw: dict) -> None:
    from mm_models.fsdp2 import weights

    weights.AT_A_TIME, weights.SENT = 200_000, 10_000  # several groups, several pieces a tensor
    if rank:

        def load_shards(*args, **how):
            raise AssertionError("this rank must not read")

        weights.live_shards.load_shards = load_shards
    train(rank, raw, Synthetic())


def test_rank_zero_reads_for_all(hf, tmp_path):
    raw = config(hf, **EP2)
    plain = launch(2, raw, tmp_path / "a.jsonl")
    sent = changed(raw, {"training.load_rank0_and_broadcast": True, "training.log_metrics": str(tmp_path / "b.jsonl")})
    run(_only_rank_zero_reads, 2, sent, timeout=60)
    assert exact(read_metrics(tmp_path / "b.jsonl")) == exact(plain)


@pytest.mark.parametrize("broadcast", [False, True], ids=["each", "rank0"])
def test_a_missing_tensor_is_refused_or_allowed_by_name(broadcast, hf, tmp_path):
    names = ("model.visual.merger.proj.weight", "lm_head.weight")
    lacking = _without(hf, tmp_path / "lacking", *names)
    raw = config(hf, training__load=str(lacking), training__load_rank0_and_broadcast=broadcast, training__train_iters=1)
    with pytest.raises(CaseFailed) as caught:
        run(train, 2, raw, Synthetic(), timeout=60)
    assert str(caught.value).count("UserError") >= 2 and all(str(caught.value).count(name) >= 2 for name in names)
    some = {"training.load_strict": False, "training.allow_missing": ["lm_head.weight"]}
    with pytest.raises(
        CaseFailed, match=r"allow_missing \(lm_head.weight\) does not cover model.visual.merger.proj.weight"
    ):
        run(train, 2, changed(raw, some), Synthetic(), timeout=60)
    both = {"training.load_strict": False, "training.allow_missing": ["lm_head.weight", "model.visual.merger.*"]}
    first, last = printed(2, changed(raw, both))
    assert "2 tensors missing there, drawn from the seed" in first and all(f"\n  {name}" in first for name in names)
    assert "lm loss" in last and "nan" not in last.lower().replace("nan iterations", "")


# --- the same run from other places ---------------------------------------------------------------------------------------


def test_random_weights_are_those_of_the_megatron_target(hf, tmp_path):
    """The first losses of both targets from the same seed over the same samples."""
    flags = [*tiny_flags(tmp_path / "mcore", "--from-scratch", steps=3), "--weight-decay", "0.1"]
    want = launch_synthetic(1, flags, tmp_path / "a.jsonl", Uneven())
    scratch = {"training.load": None, "training.from_scratch": True, "training.train_iters": 3}
    for nprocs in (1, 2):
        steps = {"training.gradient_accumulation_steps": 4 // nprocs, "training.lr_decay_style": "linear"}
        got = launch(nprocs, config(hf, **scratch | steps | (EP2 if nprocs == 2 else {})), tmp_path / "b.jsonl")
        assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-6)
        for mine, theirs in zip(got, want):
            assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_a_checkpoint_of_the_megatron_target_gives_weights(hf, tmp_path):
    from mm_models.cli.convert import main

    assert main(["hf_to_mm", "--hf", str(hf), "--out", str(tmp_path / "mm"), "--tp", "2", "--ep", "2"]) in (0, None)
    want = launch(2, config(hf, **EP2), tmp_path / "a.jsonl")
    got = launch(2, config(hf, training__load=str(tmp_path / "mm"), **EP2), tmp_path / "b.jsonl")
    assert exact(got) == exact(want)


def test_a_trained_iteration_is_exported_and_loaded_by_hugging_face(hf, tmp_path):
    from transformers import Glm4vMoeForConditionalGeneration

    from mm_models.cli.convert import main

    launch(2, config(hf, training__save=str(tmp_path / "ck"), training__train_iters=1, **EP2), tmp_path / "a.jsonl")
    assert main(["dcp_to_hf", "--dcp", str(tmp_path / "ck"), "--hf", str(hf), "--out", str(tmp_path / "new")]) in (
        0,
        None,
    )
    network = Glm4vMoeForConditionalGeneration.from_pretrained(tmp_path / "new", dtype=torch.float32)
    saved = stock(tmp_path / "ck" / "iter_0000001")
    for name, tensor in network.state_dict().items():
        assert torch.equal(saved[f"model.{name}"], tensor), name
    assert not torch.equal(network.lm_head.weight, load_file(next(hf.glob("*.safetensors")))["lm_head.weight"])


# --- what a run says -------------------------------------------------------------------------------------------------------


def test_what_is_printed_and_by_whom(hf, tmp_path):
    raw = config(
        hf,
        **EP2 | {"training.log_metrics": str(tmp_path / "m.jsonl"), "training.tensorboard_dir": str(tmp_path / "tb")},
    )
    first, last = printed(2, raw)
    assert first.count("------ configuration ------") == 1 and "configuration" not in last
    rows = [line.split() for line in first.splitlines() if line.split()[1:2] == ["cpu"]]
    assert [tuple(row[:5]) for row in rows] == [
        ("0", "cpu", "0,0", "0,0,0", "0-3"),
        ("1", "cpu", "0,1", "0,0,1", "4-7"),
    ]
    assert "none on 31 biases and vectors:" in first and "\n  model.language_model.norm.weight\n" in first
    assert "\n  model.language_model.layers.{*}.self_attn.q_proj.bias (4)\n" in first
    lines = [line for line in last.splitlines() if " iteration " in line]
    assert len(lines) == 4 and " iteration        1/       4 | consumed samples:            2 |" in lines[0]
    assert "training ended at iteration 4 of 4, 8 samples consumed" in first
    records = read_metrics(tmp_path / "m.jsonl")
    assert [r["iteration"] for r in records] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "learning_rate", "tokens", "labelled_tokens", "tokens_per_second"} <= records[0].keys()
    assert all(r["flops"] > 1e8 and r["tflops_per_second"] > 0 for r in records)
    assert " tokens/s, " in first and first.rstrip().endswith(" TFLOP/s")
    assert list((tmp_path / "tb").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("nprocs, changes", [(1, {}), (2, BF16 | EP2)], ids=["one", "ep2-bf16"])
def test_thirty_steps_from_dcp_and_from_hugging_face_are_bit_equal(nprocs, changes, hf, tmp_path):
    """Level 1: the converted checkpoint against the Hugging Face folder itself, same seed, deterministic."""
    from mm_models.cli.convert import main

    assert main(["hf_to_dcp", "--hf", str(hf), "--out", str(tmp_path / "dcp")]) in (0, None)
    raw = config(hf, training__train_iters=30, training__use_deter_comp=True, **changes)
    one = launch(nprocs, raw, tmp_path / "a.jsonl", timeout=120)
    for number, place in enumerate((tmp_path / "dcp", tmp_path / "dcp" / "release")):
        other = changed(raw, {"training.load": str(place), "training.load_format": "dcp"})
        two = launch(nprocs, other, tmp_path / f"b{number}.jsonl", timeout=120)
        assert len(two) == 30 and exact(two) == exact(one)
