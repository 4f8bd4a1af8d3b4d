"""Both targets are given the same batches, bit by bit: as each model receives them, and as the data alone says.

The short cases train for real. The long ones, 1,000 batches over several epochs of small pictures, leave the arithmetic
out: each target's own loop reads, moves and hands its micro-batches to its model, whose forward pass is replaced.
"""

from __future__ import annotations

import json
import multiprocessing
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from mm_models.cli.models import main
from mm_models.train.token_dump import Dump, difference
from tests.data import kit
from tests.fsdp2.trainer_kit import BF16, EXPERTS, FSDP, changed
from tests.harness import run
from tests.mcore.training_kit import BATCH, World, train, world  # noqa: F401


def _nothing(_) -> torch.Tensor:
    """A forward pass."""
    return torch.zeros(())


def _megatron(rank: int, argv: list[str], computes: bool) -> None:
    if not computes:
        from mm_models.mcore import training
        from mm_models.mcore.step import StepResult

        def train_step(session, chunks, optimizer, scheduler, pieces, step, forward_step):
            (chunk,) = chunks
            chunk.module.forward = _nothing
            (cursor,) = step.cursors(1)
            for _ in step.micro:
                forward_step(cursor, chunk)
            return StepResult(loss=1.0, grad_norm=1.0, skipped=False)

        training.train_step = train_step
    _may_have_workers()
    train(rank, argv)


def _fsdp2(rank: int, config: str, computes: bool) -> None:
    from mm_models.config.fsdp2 import load_config
    from mm_models.fsdp2 import training, validation
    from mm_models.fsdp2.step import StepResult
    from mm_models.train.session import world_size

    if not computes:

        @torch.no_grad()
        def train_step(session, model, optimizer, step, *, rate, flops):
            model.forward = _nothing
            for micro in step.micro:
                model(micro.data)
            return StepResult(loss=1.0, grad_norm=1.0, skipped=False, flops=flops)

        training.train_step = train_step
    _may_have_workers()
    training.train(validation.plan(load_config(config), world_size(), "cpu"))


def _may_have_workers() -> None:
    """The harness's processes are daemons, which may not start any."""
    multiprocessing.current_process()._config["daemon"] = False


def megatron(world: World, data: Path, out: Path, *flags: str, ranks: int, batches: int = 8, computes: bool) -> Dump:  # noqa: F811
    argv = world.flags(*flags, "--dump-tokens", str(out), "--log-interval", "1000", steps=batches, data=data)
    argv += ["--dump-batches", str(batches)]
    run(_megatron, ranks, argv, computes, timeout=700)
    return Dump(out)


def fsdp2(world: World, data: Path, out: Path, *, ranks: int, batches: int = 8, computes: bool) -> Dump:  # noqa: F811
    raw = {
        "parallel": {"fsdp_plan": {"apply_modules": FSDP}, "ep_plan": {"apply_modules": EXPERTS}},
        "data": yaml.safe_load(data.read_text()),
        "model": {"model_id": "glm4v_moe", "model_name_or_path": str(world.hf)},
        "training": {"train_iters": batches, "lr": 1e-4, "load": str(world.hf), "log_interval": 1000},
        "tools": {"token_dump": {"enable": True, "dir": str(out), "batches": batches}},
    }
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(changed(raw, {**BF16, "training.gradient_accumulation_steps": BATCH // ranks})))
    run(_fsdp2, ranks, str(path), computes, timeout=700)
    return Dump(out)


def alone(world: World, data: Path, out: Path, *, batches: int = 8) -> Dump:  # noqa: F811
    """The data without a model."""
    argv = ["--mm-model", str(world.model()), "--mm-data", str(data), "--global-batch-size", str(BATCH)]
    assert main(["tokens", "dump", *argv, "--batches", str(batches), "-o", str(out)]) == 0
    return Dump(out)


def same(expected: Dump, found: Dump, *, batches: int = 8) -> None:
    assert found.steps == expected.steps == list(range(1, batches + 1))
    assert difference(expected, found) is None


def orders(dump: Dump, *, steps: int) -> list[list[int]]:
    """Sample ids of each whole epoch of `steps`, each at most once."""
    ids = [row.sample_id for step in dump.steps for row in dump.batch(step).rows]
    epochs = [ids[at : at + steps * BATCH] for at in range(0, len(ids) - steps * BATCH + 1, steps * BATCH)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    return epochs


@pytest.fixture
def data(world: World):  # noqa: F811
    """Twelve rows, three batches: eight batches cross two ends of an epoch."""

    def made(*, workers: int) -> Path:
        return world.data(f"data_{workers}", num_workers=workers, max_samples=12)

    return made


def twelve_anew(dump: Dump) -> None:
    """Field case B64: the same samples in another order."""
    first, second = orders(dump, steps=3)
    assert sorted(first) == sorted(second) == list(range(12)) and first != second


def test_the_megatron_target_over_two_stages(world, data, tmp_path):  # noqa: F811
    """No stage is given everything; the dump has it. The expected batches come out of four workers."""
    expected = alone(world, data(workers=4), tmp_path / "alone")
    flags = ("--pipeline-model-parallel-size", "2")
    split = world.model(
        "split", vision_encoder={"pipeline_num_layers": [2, 0]}, text_decoder={"pipeline_num_layers": [2, 2]}
    )
    argv = world.flags(*flags, "--dump-tokens", str(tmp_path / "mcore"), steps=8, model=split, data=data(workers=0))
    run(_megatron, 2, argv, True, timeout=120)
    found = Dump(tmp_path / "mcore")
    assert found.stages == 2
    same(expected, found)
    twelve_anew(found)


def test_the_fsdp2_target_over_two_ranks(world, data, tmp_path):  # noqa: F811
    """In bf16: the dump comes before the wrapper's cast."""
    expected = alone(world, data(workers=0), tmp_path / "alone")
    found = fsdp2(world, data(workers=0), tmp_path / "fsdp2", ranks=2, computes=True)
    same(expected, found)
    twelve_anew(found)


THOUSAND, ROWS = 1000, 603
"""Batches; rows, of which three are left out of each epoch of 150 batches."""


@pytest.fixture(scope="module")
def many(world: World):  # noqa: F811
    """data.json over rows of one or two turns with up to two small pictures, examined once for all runs."""
    base = world.folder / "many"
    rows = []
    for k in range(ROWS):
        sizes = [(28 * (1 + (k + i) % 3), 28 * (1 + (k // 3 + i) % 2)) for i in range(k % 3)]
        names = [kit.picture(base / f"{k}-{i}.png", *size, seed=3 * k + i).name for i, size in enumerate(sizes)]
        turns = ["<image>" * len(names) + f"question {k}", "answer " + "x" * (k % 17), "more?", f"yes {k}"]
        rows.append(kit.row(*turns[: 4 if k % 5 == 0 else 2], images=names))
    (base / "train.json").write_text(json.dumps(rows))

    def made(*, shuffle: bool, workers: int) -> Path:
        changes = {"dataset_dir": str(base), "dataset": str(base / "train.json"), "cache_dir": str(base / "cache")}
        changes |= {} if shuffle else {"sampler_type": "SequentialBatchSampler"}
        return world.data(f"many_{shuffle}_{workers}", shuffle=shuffle, num_workers=workers, **changes)

    return made


@pytest.fixture(scope="module")
def thousand(world: World, many, tmp_path_factory):  # noqa: F811
    """The batches of the data alone, in either order."""

    @cache
    def made(shuffle: bool) -> Dump:
        out = tmp_path_factory.mktemp("alone") / "dump"
        dump = alone(world, many(shuffle=shuffle, workers=0), out, batches=THOUSAND)
        found = orders(dump, steps=ROWS // BATCH)
        assert len(found) == 6 and len(set(map(tuple, found))) == (6 if shuffle else 1)
        return dump

    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_thousand_batches_of_both_targets(world, many, thousand, tmp_path, shuffle, ranks, workers):  # noqa: F811
    expected, config = thousand(shuffle), many(shuffle=shuffle, workers=workers)
    for target in (megatron, fsdp2):
        found = target(world, config, tmp_path / target.__name__, ranks=ranks, batches=THOUSAND, computes=False)
        assert found.dp_size == ranks
        same(expected, found, batches=THOUSAND)
