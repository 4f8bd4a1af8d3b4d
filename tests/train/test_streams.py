"""Both targets are given the same batches, bit by bit: as each model receives them, and as the data alone says.

The default cases train for real. The long ones leave the arithmetic out: each target's own loop reads, moves and hands its
micro-batches to the dump's hook, and no model computes.
"""

from __future__ import annotations

import itertools
import multiprocessing
from pathlib import Path

import pytest
import yaml

from mm_models.cli.models import main
from mm_models.train.token_dump import Dump, difference
from tests.fsdp2.trainer_kit import BF16, EXPERTS, FSDP, changed
from tests.harness import run
from tests.mcore.training_kit import BATCH, World, train, world  # noqa: F401


def _hand_over(module, step) -> None:
    """Give a step's micro-batches to the dump, whose hook is the first."""
    hook = next(iter(module._forward_pre_hooks.values()))
    for micro in step.micro:
        hook(module, (micro.data,))


def _megatron(rank: int, argv: list[str], computes: bool) -> None:
    if not computes:
        from mm_models.mcore import training
        from mm_models.mcore.step import StepResult

        def train_step(session, chunks, optimizer, scheduler, pieces, step, forward_step):
            _hand_over(chunks[0], step)
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

        def train_step(session, model, optimizer, step, *, rate, flops):
            _hand_over(model, step)
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


@pytest.fixture
def data(world: World):  # noqa: F811
    def made(*, shuffle: bool, workers: int) -> Path:
        name = f"data_{shuffle}_{workers}"
        kind = {} if shuffle else {"sampler_type": "SequentialBatchSampler"}
        return world.data(name, shuffle=shuffle, num_workers=workers, **kind)

    return made


def test_the_megatron_target_over_two_stages(world, data, tmp_path):  # noqa: F811
    """No stage is given everything; the dump has it. The expected batches come out of four workers."""
    expected = alone(world, data(shuffle=True, workers=4), tmp_path / "alone")
    flags = ("--pipeline-model-parallel-size", "2")
    split = world.model(
        "split", vision_encoder={"pipeline_num_layers": [2, 0]}, text_decoder={"pipeline_num_layers": [2, 2]}
    )
    argv = world.flags(
        *flags, "--dump-tokens", str(tmp_path / "mcore"), steps=8, model=split, data=data(shuffle=True, workers=0)
    )
    run(_megatron, 2, argv, True, timeout=120)
    found = Dump(tmp_path / "mcore")
    assert found.stages == 2
    same(expected, found)


def test_the_fsdp2_target_over_two_ranks(world, data, tmp_path):  # noqa: F811
    """In bf16: the dump comes before the wrapper's cast."""
    expected = alone(world, data(shuffle=False, workers=0), tmp_path / "alone")
    assert [row.sample_id for row in expected.batch(2).rows] == [4, 5, 6, 7]
    same(expected, fsdp2(world, data(shuffle=False, workers=0), tmp_path / "fsdp2", ranks=2, computes=True))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("shuffle", "ranks", "workers", "batches"),
    [*itertools.product((True, False), (1, 2, 4), (0, 4), (8,)), (True, 2, 4, 1000)],
)
def test_both_targets(world, data, tmp_path, shuffle, ranks, workers, batches):  # noqa: F811
    options = {"ranks": ranks, "batches": batches, "computes": False}
    config = data(shuffle=shuffle, workers=workers)
    expected = alone(world, data(shuffle=shuffle, workers=0), tmp_path / "alone", batches=batches)
    same(expected, megatron(world, config, tmp_path / "mcore", **options), batches=batches)
    same(expected, fsdp2(world, config, tmp_path / "fsdp2", **options), batches=batches)
