"""Evaluation on the Megatron target: Hugging Face's loss on every topology, and a training that does not notice it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.validation import plan
from mm_models.train.entry import StoppedBySignal
from mm_models.train.log import read_metrics
from mm_models.weights.manifest import open_checkpoint
from tests.harness import run
from tests.mcore.test_checkpoint import crcs, exact
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import launch, train, world  # noqa: F401
from tests.train.evaluation_kit import apart, hugging_face, same, watch, with_split
from tests.weights.folders import to_hf

RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
CASES = {
    "dp2": (2, topology()),
    "tp2": (2, [*topology(tp=2), SP]),
    "pp2": (2, topology(pp=2)),
    "tp1": (1, []),
    "ep2-distributed-recompute": (2, [*topology(ep=2), DISTRIBUTED, *RECOMPUTE]),
    "pp2-vpp2": (2, topology(pp=2, vpp=2)),
    "tp2-etp1-ep2": (2, [*topology(tp=2, etp=1, ep=2), SP, "--recompute-granularity", "selective"]),
    "dp2-pp2": (4, topology(pp=2)),
    "tp2-pp2": (4, [*topology(tp=2, pp=2), SP, *RECOMPUTE]),
}
SHORT = ("dp2", "tp2", "pp2")


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in SHORT)])
def test_the_loss_is_hugging_faces(name, world, tmp_path):  # noqa: F811
    """Of the weights after the last step, over rows with and without images; micro-batches of one and two rows."""
    nprocs, flags = CASES[name]
    data, micro = with_split(world), 1 if nprocs == 4 or "vpp2" in name else 2
    argv = world.flags(*flags, "--eval-interval", "9", "--save", str(tmp_path / "ck"), data=data, steps=2, micro=micro)
    _, found = apart(launch(nprocs, argv, tmp_path / "m.jsonl"))
    trained = to_hf(tmp_path / "ck", world.hf, tmp_path / "hf")
    ((loss, tokens),) = run(hugging_face, 1, str(trained), str(world.model()), str(data), 2)
    assert found == {2: (pytest.approx(loss, rel=1e-6), tokens)}


def watched(rank: int, argv: list[str]) -> None:
    watch()
    train(rank, argv)


def states(folder: Path) -> list:
    """The random states of the last checkpoint."""
    files = sorted(open_checkpoint(folder).folder.glob("**/model_optim_rng.pt"))
    assert files
    return [torch.load(file, weights_only=True)["rng_state"] for file in files]


@pytest.mark.parametrize(
    "nprocs, flags",
    [(2, topology(pp=2)), pytest.param(2, [DISTRIBUTED, *RECOMPUTE], marks=pytest.mark.slow)],
    ids=["pp2", "dp2-recompute"],
)
def test_training_does_not_notice_and_a_resumed_run_evaluates_the_same(nprocs, flags, world, tmp_path):  # noqa: F811
    def go(name: str, *more: str, start: str = "hf") -> list[dict]:
        save = ["--save", str(tmp_path / name), "--save-interval", "2"]
        argv = world.flags(*flags, *save, *more, data=with_split(world), steps=3, start=start)
        run(watched, nprocs, [*argv, "--log-metrics", str(tmp_path / f"{name}.jsonl")], timeout=90)
        return read_metrics(tmp_path / f"{name}.jsonl")

    asked = ["--eval-interval", "2", "--eval-iters", "1"]
    plain = go("a")
    trained, found = apart(go("b", *asked))
    assert exact(trained) == exact(plain)
    assert crcs(tmp_path / "a", 3) == crcs(tmp_path / "b", 3)
    assert same(states(tmp_path / "a"), states(tmp_path / "b"))
    assert sorted(found) == [2, 3] and found[2][1] == found[3][1] and found[2][0] != found[3][0]
    trained, later = apart(go("c", *asked, "--ckpt-step", "2", start=str(tmp_path / "b")))
    assert exact(trained) == exact(plain[2:]) and later == {3: found[3]}


def test_what_a_run_says_of_its_split_before_it_starts(world):  # noqa: F811
    def planned(*words: str, **basic) -> tuple[str, ...]:
        return plan(parse(world.flags(*words, data=world.data("planned", **basic))), 1).notes

    rows = json.loads(with_split(world).read_text())["dataset_param"]["basic_parameters"]["val_dataset"]
    assert planned() == planned("--eval-interval", "3", val_rate=0.5) == ()
    assert planned(val_dataset=rows) == (
        f"validation: val_dataset {rows} is not evaluated; --eval-interval asks for it",
    )
    assert planned(val_rate=0.5) == ("validation: val_rate 0.5 is not evaluated; --eval-interval asks for it",)
    for words, told, basic in (
        (["--eval-interval", "3"], "--eval-interval 3: val_dataset and val_rate are null.*Name a file in", {}),
        (["--eval-interval", "3"], "--eval-interval 3: .*none.json", {"val_dataset": "none.json"}),
        (["--eval-iters", "3"], "--eval-iters without --eval-interval", {"val_rate": 0.5}),
    ):
        with pytest.raises(UserError, match=told):
            planned(*words, **basic)


def stopped(rank: int, argv: list[str]) -> str:
    """A run that gets SIGTERM while it reads its second step; what it says of that."""
    import pretrain_vlm as entry
    from mm_models.mcore.session import current
    from mm_models.mcore.training import pretrain

    def provider(*given, **more):
        train, valid, _ = entry.train_valid_test_datasets_provider(*given, **more)

        def read():
            for batch in train:
                if current().position.step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return read(), valid, None

    try:
        pretrain(provider, entry.model_provider, entry.forward_step, parse(argv))
    except StoppedBySignal as stop:
        return str(stop)


def test_a_signal_saves_and_leaves_without_an_evaluation(world, tmp_path):  # noqa: F811
    argv = world.flags("--eval-interval", "1", "--save", str(tmp_path / "ck"), data=with_split(world))
    (said,) = run(stopped, 1, [*argv, "--log-metrics", str(tmp_path / "m.jsonl")], timeout=60)
    trained, found = apart(read_metrics(tmp_path / "m.jsonl"))
    assert "stopped by SIGTERM after iteration 2, saved at iteration 2" in said
    assert (len(trained), list(found)) == (2, [1])
