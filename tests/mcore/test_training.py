"""Training through the entry script's own callbacks: the same losses as a plain Hugging Face loop on every topology."""

from __future__ import annotations

import pytest

from tests.harness import CaseFailed
from tests.mcore.training_kit import Synthetic, launch, launch_synthetic, reference, tiny_flags, world  # noqa: F401

FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--virtual-pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}
SP, DISTRIBUTED = "--sequence-parallel", "--use-distributed-optimizer"


def topology(**degrees: int) -> list[str]:
    return [word for name, value in degrees.items() for word in (FLAGS[name], str(value))]


@pytest.fixture(scope="module")
def losses(world):  # noqa: F811
    return reference(world)["records"]


def agree(records: list[dict], expected: list[dict], tolerance: float = 1e-5) -> None:
    assert [r["iteration"] for r in records] == list(range(1, len(expected) + 1))
    for got, want in zip(records, expected):
        assert got["loss"] == pytest.approx(want["loss"], rel=tolerance), (got, want)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), (got, want)


CASES = {
    "tp1": (1, topology()),
    "tp1-distributed": (1, [DISTRIBUTED]),
    "dp2": (2, topology()),
    "dp2-distributed": (2, [DISTRIBUTED]),
    "ep2": (2, topology(ep=2)),
    "ep2-distributed": (2, [*topology(ep=2), DISTRIBUTED]),
    "pp2": (2, topology(pp=2)),
    "pp2-vpp2": (2, topology(pp=2, vpp=2)),
    "tp2-sp": (2, [*topology(tp=2), SP]),
    "tp2-etp1-ep2": (2, [*topology(tp=2, etp=1, ep=2), SP, DISTRIBUTED]),
    "full-recompute": (1, ["--recompute-granularity", "full", "--recompute-method", "uniform"]),
    "block-recompute": (
        2,
        [
            *topology(pp=2),
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "block",
            "--recompute-num-layers",
            "1",
        ],
    ),
    "selective-recompute": (2, [*topology(tp=2), SP, "--recompute-granularity", "selective"]),
    "tp2-pp2": (4, [*topology(tp=2, pp=2), SP]),
    "dp2-pp2-distributed": (4, [*topology(pp=2), DISTRIBUTED]),
    "tp2-ep2-distributed": (4, [*topology(tp=2, ep=2), SP, DISTRIBUTED]),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_a_plain_hugging_face_loop(name, world, losses, tmp_path):  # noqa: F811
    nprocs, flags = CASES[name]
    records = launch(nprocs, world.flags(*flags), tmp_path / "metrics.jsonl")
    agree(records, losses)


def test_from_scratch_starts_and_goes_the_same_everywhere(tmp_path):
    argv = tiny_flags(tmp_path, "--from-scratch", steps=3)
    one = launch_synthetic(1, argv, tmp_path / "one.jsonl")
    four = launch_synthetic(4, [*argv, *topology(tp=2, etp=1, pp=2), SP], tmp_path / "four.jsonl")
    agree(four, one)
    other = launch_synthetic(1, [*argv, "--seed", "2"], tmp_path / "two.jsonl")
    assert other[0]["loss"] != pytest.approx(one[0]["loss"], rel=1e-4)


def test_fewer_samples_than_one_global_batch_is_an_error(tmp_path):
    with pytest.raises(CaseFailed, match="3 samples are fewer than one global batch of 4"):
        launch_synthetic(2, tiny_flags(tmp_path, "--from-scratch"), tmp_path / "m.jsonl", Synthetic(total=3))
