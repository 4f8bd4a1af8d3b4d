"""Saving and resuming: exact to the bit, at another number of processes and expert split, and nothing wrong goes unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mm_models.config.fsdp2 import RunConfig
from mm_models.config.strict import validate
from mm_models.fsdp2.schedule_lr import Schedule, learning_rate
from tests.fsdp2.trainer_kit import (
    BF16,
    Synthetic,
    assert_same_step,
    changed,
    config,
    launch,
    manifest,
    printed,
    stock,
    train,
    write_hf,
)
from tests.harness import CaseFailed, run

EXACT = (
    "iteration", "consumed_samples", "learning_rate", "next_learning_rate", "loss", "grad_norm", "tokens", "labelled_tokens",
)  # fmt: skip
SCHEDULE = {
    "training__lr_decay_style": "cosine", "training__lr_warmup_ratio": 0.3, "training__lr_min": 1e-5,
    "training__lr_start": 1e-4,
}  # fmt: skip


@pytest.fixture(scope="session")
def hf(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "hf")


def exact(records: list[dict]) -> list[tuple]:
    return [tuple(record[key] for key in EXACT) for record in records]


def settings(hf: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Six steps of four samples, a checkpoint every three."""
    common = {"training__train_iters": 6, "training__save": str(folder), "training__save_interval": 3}
    return config(hf, **common | SCHEDULE | changes)


QUICK = {"one", "fsdp2", "ep2-bf16", "fsdp2 to one", "one to ep2"}
"""The rest belongs to the long tail."""


def quick_or_slow(name: str, quick: set[str]):
    return name if name in quick else pytest.param(name, marks=pytest.mark.slow)


CASES = {
    "one": (1, 4, {}),
    "one-bf16": (1, 4, BF16),
    "fsdp2": (2, 2, {}),
    "ep2-bf16": (2, 2, BF16 | {"parallel.expert_parallel_size": 2}),
    "hsdp-ep2": (4, 1, {"parallel.expert_parallel_size": 2, "parallel.fully_shard_parallel_size": 2}),
    "stacked": (2, 2, {"parallel.expert_parallel_size": 2, "model.expert_layout": "stacked"}),
}


@pytest.mark.parametrize("name", [quick_or_slow(name, QUICK) for name in CASES])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(name, hf, tmp_path):
    nprocs, accumulation, changes = CASES[name]
    changes = changes | {"training.gradient_accumulation_steps": accumulation}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = launch(nprocs, settings(hf, whole, **changes), tmp_path / "a.jsonl")
    resumed = launch(
        nprocs, settings(hf, broken, training__load=str(whole / "iter_0000003"), **changes), tmp_path / "b.jsonl"
    )
    assert [r["iteration"] for r in resumed] == [4, 5, 6]
    assert exact(resumed) == exact(unbroken[3:])
    one, two = stock(whole / "iter_0000006"), stock(broken / "iter_0000006")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert {key for key in one if key.startswith("optimizer.state.lm_head.weight.")} == {
        f"optimizer.state.lm_head.weight.{part}" for part in ("exp_avg", "exp_avg_sq", "step")
    }
    assert one["optimizer.state.lm_head.weight.step"].item() == 6.0
    assert {child.name for child in broken.iterdir()} == {"iter_0000006", "latest_checkpointed_iteration.txt"}
    assert manifest(whole / "iter_0000006")["expert_layout"] == changes.get("model.expert_layout", "stacked_hf")
    for folder in whole.glob("iter_*"):
        torch.load(folder / "trainer.pt", weights_only=True)  # plain data only
        assert (folder / "config.yaml").read_text().startswith("parallel:")


# --- another number of processes, another expert split ---------------------------------------------------------------------

MOVES = {
    "fsdp2 to one": ((2, {}), (1, {})),
    "one to ep2": ((1, {}), (2, {"parallel.expert_parallel_size": 2})),
    "ep2 to ep4": ((2, {"parallel.expert_parallel_size": 2}), (4, {"parallel.expert_parallel_size": 4})),
    "ep2-fsdp2 to hsdp": (
        (4, {"parallel.expert_parallel_size": 2}),
        (4, {"parallel.fully_shard_parallel_size": 2}),
    ),
}


@pytest.mark.parametrize("name", [quick_or_slow(name, QUICK) for name in MOVES])
def test_a_run_goes_on_at_another_layout(name, hf, tmp_path):
    """Weights, moments, schedule and data position are carried. The first step is the unbroken run's up to rounding; later ones
    may send a token to another expert."""
    (nprocs, before), (others, after) = MOVES[name]
    each = {"training.save_interval": 1, "training.gradient_accumulation_steps": 4 // nprocs}
    whole = launch(nprocs, settings(hf, tmp_path / "ck", **before | each), tmp_path / "a.jsonl")
    load = {"training.load": str(tmp_path / "ck" / "iter_0000003"), "training.exit_interval": 4}
    going = settings(hf, tmp_path / "again", **after | load | {"training.gradient_accumulation_steps": 4 // others})
    (got,) = launch(others, going, tmp_path / "b.jsonl")
    want = whole[3]
    for key in ("iteration", "learning_rate", "next_learning_rate", "consumed_samples"):
        assert got[key] == want[key]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    one, two = (stock(tmp_path / folder / "iter_0000004") for folder in ("ck", "again"))
    assert_same_step(two, one, steps=1)
    value = one["optimizer.state.model.language_model.layers.1.mlp.experts.down_proj.exp_avg"]
    assert not torch.equal(value[3], value[7])  # every expert has moments of its own


def _fill_experts(folder: Path) -> None:
    """Every expert's weights are its number + 1."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        for name, tensor in state.items():
            if ".experts." in name:
                number = name.split(".experts.")[1].split(".")[0]
                if number.isdecimal():
                    tensor.fill_(int(number) + 1)
                else:
                    tensor.copy_(torch.arange(1.0, len(tensor) + 1).view(-1, 1, 1).expand_as(tensor))
        save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize("nprocs, ep", [(2, 2), (4, 2)])
def test_every_experts_weights_are_saved_once(nprocs, ep, tmp_path):
    """B02: at learning rate (almost) 0 expert e is e + 1, whichever rank holds it."""
    numbered = write_hf(tmp_path / "hf")
    _fill_experts(numbered)
    frozen = {"model.freeze": ["model.language_model", "lm_head"], "parallel.expert_parallel_size": ep}
    launch(nprocs, settings(numbered, tmp_path / "ck", training__train_iters=1, **frozen), tmp_path / "a.jsonl")
    saved = stock(tmp_path / "ck" / "iter_0000001")
    experts = {key: value for key, value in saved.items() if ".mlp.experts." in key}
    assert len(experts) == 6 and not any(key.startswith("optimizer") for key in experts)
    for key, value in experts.items():
        assert value.shape[0] == 8 and value.flatten(1).unique(dim=1).tolist() == [[n] for n in range(1, 9)], key


# --- what is loaded and what is not -----------------------------------------------------------------------------------------


def test_position_without_optimizer_or_random_states(hf, tmp_path):
    two = {"training.gradient_accumulation_steps": 2}
    saved = settings(
        hf, tmp_path / "ck", training__train_iters=3, training__no_save_optim=True, training__no_save_rng=True
    )
    first, _ = printed(2, changed(saved, two))
    held = stock(tmp_path / "ck" / "iter_0000003")
    assert held and not any(key.startswith("optimizer") for key in held)
    going = changed(saved, two | {"training.load": str(tmp_path / "ck"), "training.train_iters": 4})
    going = changed(going, {"training.resume_schedule": "checkpoint"})
    with pytest.raises(CaseFailed, match="holds no optimizer state"):
        run(train, 2, going, Synthetic())
    going = changed(going, {"training.load": str(tmp_path / "ck" / "iter_0000003")})
    first, last = printed(2, changed(going, {"training.no_load_optim": True}))
    assert "iter_0000003: iteration 3, 12 samples consumed" in first
    assert first.count("optimizer state not loaded (training.no_load_optim)") == 1
    assert first.count("random states are not in the checkpoint: seeded from training.seed and the iteration") == 1
    assert "training.train_iters was 3, is 4" in first
    assert "iteration        4/       4" in last
    first, _ = printed(2, changed(going, {"training.no_load_optim": True, "training.no_load_rng": True}))
    assert first.count("random states not loaded (training.no_load_rng)") == 1
    saved = Schedule.of(validate(RunConfig, saved, "the test").training)  # and the schedule goes on all the same
    assert f"resumed at step 3, learning rate {learning_rate(3, saved):.6E}" in first
    assert f"learning rate: {learning_rate(4, saved):.6E}" in last


@pytest.mark.parametrize("file", ["trainer.pt", "__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_damaged_checkpoint_is_refused_by_name(file, how, hf, tmp_path):
    launch(2, settings(hf, tmp_path / "ck", training__train_iters=1), tmp_path / "a.jsonl")
    path = tmp_path / "ck" / "iter_0000001" / file
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-100])
    going = settings(hf, tmp_path / "b", training__load=str(tmp_path / "ck"), training__train_iters=2)
    with pytest.raises(CaseFailed, match=r"UserError") as caught:
        run(train, 2, changed(going, {"training.resume_schedule": "config"}), Synthetic(), timeout=60)
    assert file in str(caught.value) or (file == ".metadata" and how == "gone" and "iter_0000001" in str(caught.value))


def test_a_flipped_byte_anywhere_in_the_trainer_file_is_refused(hf, tmp_path):
    """The position, the random states, the schedule: whatever holds a value is compared with its checksum."""
    from mm_models.errors import UserError
    from mm_models.fsdp2 import checkpoint

    launch(1, settings(hf, tmp_path / "ck", training__train_iters=1), tmp_path / "a.jsonl")
    file = tmp_path / "ck" / "iter_0000001" / checkpoint.TRAINER_FILE
    whole, good = file.read_bytes(), str(checkpoint._load(file))
    refused = 0
    for at in range(7, len(whole), 97):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert str(checkpoint._load(file)) == good, at  # between two entries, where nothing is read
        except UserError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > len(whole) / 97 / 2


def test_a_changed_schedule_and_a_finished_run_are_refused(hf, tmp_path):
    launch(1, settings(hf, tmp_path / "ck", training__train_iters=2), tmp_path / "a.jsonl")
    again = {"training__load": str(tmp_path / "ck"), "training__train_iters": 2}
    with pytest.raises(CaseFailed, match=r"stands at iteration 2, and training.train_iters is 2.*nothing to do"):
        run(train, 1, settings(hf, tmp_path / "ck", **again), Synthetic())
    with pytest.raises(CaseFailed, match=r"warmup was 0\.6, is now 0\.9;.*training\.resume_schedule=config"):
        run(train, 1, settings(hf, tmp_path / "ck", **again | {"training__train_iters": 3}), Synthetic())


@pytest.mark.slow
def test_the_data_position_is_resumed_on_every_rank(hf, tmp_path):
    """23 samples on two ranks: five steps an epoch, three samples left out; stopped in the first and in the second epoch."""
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    base = config(hf, training__gradient_accumulation_steps=2, training__train_iters=12)
    run(train, 2, base, Synthetic(record=str(tmp_path / "whole")), timeout=60)
    broken, save = Synthetic(record=str(tmp_path / "broken")), {"training.save": str(tmp_path / "ck")}
    load = {"training.load": str(tmp_path / "ck")}
    for change in ({"training.exit_interval": 3}, load | {"training.exit_interval": 9}, load):
        run(train, 2, changed(base, save | change), broken, timeout=60)
    read = {
        name: [(tmp_path / name / f"rank{rank}.txt").read_text() for rank in range(2)] for name in ("whole", "broken")
    }
    assert read["whole"] == read["broken"]
    rows = [line.split() for text in read["whole"] for line in text.splitlines()]
    epoch = [id for step, *ids in rows if int(step) <= 5 for id in ids]
    assert len(epoch) == len(set(epoch)) == 20


def test_sigterm_on_one_rank_saves_on_all_and_resumes_exactly(hf, tmp_path):
    two = {"training.gradient_accumulation_steps": 2, "training.train_iters": 5}
    unbroken = launch(2, config(hf, **two), tmp_path / "a.jsonl")
    saving = config(
        hf, **two | {"training.save": str(tmp_path / "ck"), "training.log_metrics": str(tmp_path / "b.jsonl")}
    )
    stopped = run(train, 2, saving, Synthetic(terminate=(2, 1)), timeout=60)
    assert all("stopped by SIGTERM after iteration 2, saved at iteration 2" in text for text in stopped)
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = launch(2, changed(saving, {"training.load": str(tmp_path / "ck")}), tmp_path / "b.jsonl")
    assert exact(resumed) == exact(unbroken)  # the metrics file holds the whole run


def _dirty(rank: int, raw: dict) -> dict[str, tuple]:
    """Fill freed memory with NaN, build as a run does, and give back every buffer."""
    from mm_models.config.fsdp2 import RunConfig
    from mm_models.config.strict import validate
    from mm_models.fsdp2 import session, training, validation

    for size in [1 << k for k in range(4, 22)] * 4:
        torch.full((size,), float("nan"))
    plan = validation.plan(validate(RunConfig, raw, "the test"), torch.distributed.get_world_size(), "cpu")
    trainer, _ = training.set_up(session.start(plan))
    return {name: (buffer.dtype, buffer.clone()) for name, buffer in trainer.model.named_buffers()}


def test_buffers_are_right_on_every_rank_at_load_and_at_resume(hf, tmp_path):
    """B10: memory is dirty, and no checkpoint holds the frequencies."""
    from tests.models import tiny_glm_model

    want = dict(tiny_glm_model().named_buffers())
    half = BF16 | {"parallel.expert_parallel_size": 2, "training.gradient_accumulation_steps": 2}
    start = settings(hf, tmp_path / "ck", training__train_iters=3, **half)
    launch(2, start, tmp_path / "a.jsonl")
    again = changed(start, {"training.load": str(tmp_path / "ck"), "training.train_iters": 4})
    for raw in (start, changed(again, {"training.resume_schedule": "config"})):
        for found in run(_dirty, 2, raw, timeout=60):
            assert {name for name in found if "inv_freq" in name}
            for name, (dtype, buffer) in found.items():
                assert dtype == torch.float32 and torch.equal(buffer, want[name]), name
