"""Losses, norms and weights of every layout against a plain Hugging Face loop; empty labels, text-only batches, frozen parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fsdp2.trainer_kit import (
    BF16,
    CLIP,
    STEPS,
    Synthetic,
    assert_same_step,
    config,
    launch,
    printed,
    reference,
    stock,
    train,
    write_hf,
)
from tests.harness import CaseFailed, run

BATCH = 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "ep2": (2, {"parallel.expert_parallel_size": 2}),
    "hsdp": (4, {"parallel.fully_shard_parallel_size": 2}),
    "ep2-fsdp2": (4, {"parallel.expert_parallel_size": 2}),
    "ep4-prefetch": (
        4,
        {
            "parallel.expert_parallel_size": 4,
            "parallel.fsdp_plan.num_to_forward_prefetch": 1,
            "parallel.fsdp_plan.num_to_backward_prefetch": 1,
        },
    ),
}


@pytest.fixture(scope="session")
def hf(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "hf")


def settings(hf: Path, nprocs: int, **changes: Any) -> dict[str, Any]:
    """Steps of four samples, one a forward."""
    return config(hf, **{"training.gradient_accumulation_steps": BATCH // nprocs} | changes)


def close(got: list[dict], want: list[dict]) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.fixture(scope="session")
def answers(hf) -> dict[str, dict]:
    """Hugging Face's, by loss type."""
    return {kind: reference(hf, steps=STEPS, batch=BATCH, loss_type=kind) for kind in ("default", "per_token_loss")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_hugging_face(name, hf, answers, tmp_path):
    nprocs, changes = LAYOUTS[name]
    save = {"training.save": str(tmp_path / "ck")}
    close(launch(nprocs, settings(hf, nprocs, **changes | save), tmp_path / "m.jsonl"), answers["default"]["records"])
    weights = stock(tmp_path / "ck" / f"iter_{STEPS:07d}")
    trained = answers["default"]["weights"]
    assert_same_step({name: weights[f"model.{name}"] for name in trained}, trained, steps=STEPS)


@pytest.mark.parametrize("kind", ["per_token_loss", "raw"])
@pytest.mark.parametrize("name", ["one", "ep2-fsdp2"])
def test_loss_types_are_hugging_faces(kind, name, hf, answers, tmp_path):
    nprocs, changes = LAYOUTS[name]
    chosen = changes | {"features.loss_cfg.loss_type": kind}
    want = answers["default" if kind == "raw" else kind]["records"]
    close(launch(nprocs, settings(hf, nprocs, **chosen), tmp_path / "m.jsonl"), want)
    apart = answers["default"]["records"][0]["loss"], answers["per_token_loss"]["records"][0]["loss"]
    assert abs(apart[0] - apart[1]) > 1e-3  # else the two could not be told apart here


@pytest.mark.parametrize("kind", ["default", "per_token_loss"])
def test_two_samples_a_forward(kind, hf, tmp_path):
    chosen = {
        "training.micro_batch_size": 2,
        "training.gradient_accumulation_steps": 1,
        "features.loss_cfg.loss_type": kind,
    }
    want = reference(hf, steps=STEPS, batch=BATCH, micro=2, loss_type=kind)["records"]
    close(launch(2, settings(hf, 2, **chosen), tmp_path / "m.jsonl"), want)


# --- batches without labels, without images -------------------------------------------------------------------------

EMPTY = {"one rank": {1, 5}, "one micro-batch": {0}, "half of the step": {1, 3, 4, 6}}


@pytest.mark.parametrize("kind", ["default", "per_token_loss"])
@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "chunked"])
def test_samples_without_labels_are_left_out(kind, chunked, hf, tmp_path):
    """Two ranks, two micro-batches a step: a rank, a micro-batch, half of a step without a label."""
    for number, gone in enumerate(EMPTY.values()):
        samples = Synthetic(order=tuple(range(8)), unlabelled=frozenset(gone))
        chosen = {"features.loss_cfg.loss_type": kind, "features.enable_chunk_loss": chunked, "training.train_iters": 2}
        chosen |= {"features.chunkloss_plan.chunk_size": 7}
        got = launch(2, settings(hf, 2, **chosen), tmp_path / f"{number}.jsonl", samples)
        close(got, reference(hf, steps=2, batch=BATCH, loss_type=kind, samples=samples)["records"])


def test_a_step_without_any_label_is_skipped(hf, tmp_path):
    samples = Synthetic(order=tuple(range(12)), unlabelled=frozenset({4, 5, 6, 7}))
    save = {"training.save": str(tmp_path / "ck"), "training.save_interval": 1, "training.weight_decay": 0.0}
    raw = settings(hf, 2, **save | {"training.train_iters": 3, "training.log_metrics": str(tmp_path / "m.jsonl")})
    first, last = printed(2, raw, samples)
    warning = "WARNING step 2: no labelled token in the whole global batch, step skipped; samples [4, 5, 6, 7]"
    assert first.count(warning) == 1 and warning not in last
    before, after = (stock(tmp_path / "ck" / f"iter_000000{n}") for n in (1, 2))
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert after["optimizer.state.lm_head.weight.step"].item() == 1.0
    assert "number of skipped iterations:   1" in last and last.count("lm loss") == 2


def test_text_only_ranks_beside_ranks_with_images(hf, tmp_path):
    """Samples 0, 3, 6 have no image: rank 0 never sees one in the first step, no rank in the second."""
    samples = Synthetic(order=(0, 1, 3, 2, 6, 9, 0, 3))
    got = launch(2, settings(hf, 2, **{"training.train_iters": 2}), tmp_path / "m.jsonl", samples)
    want = reference(hf, steps=2, batch=BATCH, samples=samples)["records"]
    close(got, want)


@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "reentrant"])
def test_a_text_only_batch_when_the_tower_alone_trains(recomputed, hf, tmp_path):
    """One process has no neighbour whose tower must be met, and nothing to send backward: as two processes, which have."""
    blocks = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
    chosen = {"model.freeze": PARTS["llm"], "features.recompute": recomputed, "training.train_iters": 2}
    chosen |= {"features.recompute_plan.use_reentrant": True, "features.recompute_plan.apply_modules": blocks}
    samples = Synthetic(order=(1, 0, 3, 2, 6, 9, 0, 3))
    one, two = (launch(n, settings(hf, n, **chosen), tmp_path / f"{n}.jsonl", samples) for n in (1, 2))
    assert one[0]["grad_norm"] > 0
    close(one, two)


# --- what trains -------------------------------------------------------------------------------------------------------

TOWER = [f"model.visual.{part}" for part in ("patch_embed", "embeddings", "blocks.{*}", "post_conv_layernorm")]
PARTS = {
    "vit": [*TOWER, "model.visual.post_layernorm", "model.visual.downsample"],
    "projector": ["model.visual.merger"],
    "llm": ["model.language_model", "lm_head"],
}


def part_of(name: str) -> str:
    if name.startswith("model.visual.merger."):
        return "projector"
    return "vit" if name.startswith("model.visual.") else "llm"


@pytest.mark.parametrize("frozen", [{"vit"}, {"projector"}, {"llm"}, {"vit", "projector"}, {"vit", "llm"}, set()])
def test_frozen_parts_keep_every_bit_and_the_rest_trains(frozen, hf, tmp_path):
    freeze = [pattern for part in sorted(frozen) for pattern in PARTS[part]]
    raw = settings(hf, 2, **{"model.freeze": freeze, "training.save": str(tmp_path / "ck"), "training.train_iters": 3})
    first, _ = printed(2, raw)
    saved = stock(tmp_path / "ck" / "iter_0000003")
    before = reference(hf, steps=0, batch=BATCH)["weights"]
    for name, old in before.items():
        kept = torch.equal(saved[f"model.{name}"], old)
        assert kept == (part_of(name) in frozen), name
        assert (f"optimizer.state.{name}.exp_avg" in saved) == (part_of(name) not in frozen), name
    trained = sum(p.numel() for name, p in before.items() if part_of(name) not in frozen)
    rows = [line.split() for line in first.splitlines() if line.split()[1:2] == ["cpu"]]
    assert sum(int(row[5].replace(",", "")) for row in rows) == trained


def test_all_frozen_is_refused(hf, tmp_path):
    raw = settings(hf, 1, **{"model.freeze": [pattern for part in PARTS.values() for pattern in part]})
    with pytest.raises(CaseFailed, match="every parameter is frozen, nothing would train"):
        run(train, 1, raw, Synthetic())


# --- going wrong -------------------------------------------------------------------------------------------------------


def _poisoned(rank: int, raw: dict, samples: Synthetic) -> str:
    from mm_models.train.entry import NonFinite

    with pytest.raises(NonFinite) as caught:
        train(rank, raw, samples)
    return str(caught.value)


@pytest.mark.parametrize("changes", [{}, BF16 | {"parallel.expert_parallel_size": 2}], ids=["fsdp2", "ep2-bf16"])
def test_a_value_that_is_not_finite_stops_all_ranks_before_the_weights(changes, hf, tmp_path):
    samples = Synthetic(order=tuple(range(1, 12)), poison=(2, 1))
    save = {"training.save": str(tmp_path / "ck"), "training.save_interval": 1}
    texts = run(_poisoned, 2, settings(hf, 2, **changes | save), samples, timeout=60)
    assert texts[0] == texts[1] and texts[0].startswith("step 2: loss nan, gradient norm nan: not finite")
    assert "rank 1: model.visual" in texts[0] and "training.lr" in texts[0]
    assert {child.name for child in (tmp_path / "ck").iterdir()} == {
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    }


@pytest.mark.slow
def test_clipping(hf, tmp_path):
    """The norm is the one before clipping; 0 clips nothing and still reports it; a small limit takes small steps."""
    free = launch(2, settings(hf, 2, **{"training.clip_grad": 0.0}), tmp_path / "a.jsonl")
    wide = launch(2, settings(hf, 2, **{"training.clip_grad": 1e9}), tmp_path / "b.jsonl")
    tight = launch(2, settings(hf, 2, **{"training.clip_grad": CLIP / 100}), tmp_path / "c.jsonl")
    assert [(r["loss"], r["grad_norm"]) for r in free] == [(r["loss"], r["grad_norm"]) for r in wide]
    assert tight[0]["grad_norm"] == free[0]["grad_norm"] > CLIP and tight[3]["loss"] != free[3]["loss"]
