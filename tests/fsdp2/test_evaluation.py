"""Evaluation on the FSDP2 target: Hugging Face's loss on every layout, and a training that does not notice it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor

from mm_models.config.fsdp2 import load_config
from mm_models.errors import UserError
from mm_models.fsdp2.validation import plan
from mm_models.train.log import read_metrics
from tests.fsdp2.test_checkpoint import exact
from tests.fsdp2.test_training_run import configuration
from tests.fsdp2.trainer_kit import stock
from tests.harness import run
from tests.mcore.training_kit import BATCH, World, world  # noqa: F401
from tests.train.evaluation_kit import apart, hugging_face, same, watch, with_split
from tests.weights.folders import from_dcp

EP2 = {"parallel__expert_parallel_size": 2}
CHUNKED = {"features__enable_chunk_loss": True, "features__chunkloss_plan": {"chunk_size": 7}}
KEPT = {
    "parallel__fsdp_plan__reshard_after_forward": False,
    "features__recompute": True,
    "features__recompute_plan__apply_modules": ["model.language_model.layers.{*}"],
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "ep2": (2, EP2),
    "one": (1, {}),
    "chunked-kept": (2, CHUNKED | KEPT),
    "hsdp": (4, {"parallel__fully_shard_parallel_size": 2}),
    "ep2-fsdp2-prefetch": (4, EP2 | {"parallel__fsdp_plan__num_to_forward_prefetch": 1}),
}
SHORT = ("fsdp2", "ep2")


def train(rank: int, path: str) -> None:
    """The run of a YAML file in this process. After an evaluation every rank holds its shards alone."""
    from mm_models.fsdp2 import training
    from mm_models.train.session import world_size

    evaluate = training.evaluate

    def evaluated(trainer, *rest) -> None:
        evaluate(trainer, *rest)
        assert world_size() == 1 or all(isinstance(p, DTensor) for p in trainer.model.parameters())

    training.evaluate = evaluated
    watch()
    training.train(plan(load_config(path), world_size(), "cpu"))


def launch(nprocs: int, world: World, folder: Path, **changes: Any) -> list[dict]:  # noqa: F811
    """Four rows a step, with the validation split; one record an iteration and one an evaluation."""
    folder.mkdir()
    data = yaml.safe_load(with_split(world).read_text())
    micro = changes.get("training__micro_batch_size", 1)
    steps = {"training__gradient_accumulation_steps": BATCH // nprocs // micro, "training__save": str(folder / "ck")}
    path = configuration(world, folder, data=data, **steps | changes)
    run(train, nprocs, str(path), timeout=90)
    return read_metrics(folder / "m.jsonl")


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in SHORT)])
def test_the_loss_is_hugging_faces(name, world, tmp_path):  # noqa: F811
    """Of the weights after the last step, over rows with and without images; micro-batches of one and two rows."""
    nprocs, changes = CASES[name]
    asked = {
        "training__eval_interval": 9,
        "training__train_iters": 2,
        "training__micro_batch_size": 4 // max(2, nprocs),
    }
    _, found = apart(launch(nprocs, world, tmp_path / "run", **asked | changes))
    trained = from_dcp(tmp_path / "run" / "ck", world.hf, tmp_path / "hf")
    ((loss, tokens),) = run(hugging_face, 1, str(trained), str(world.model()), str(with_split(world)), 2)
    assert found == {2: (pytest.approx(loss, rel=1e-6), tokens)}


def states(folder: Path) -> list:
    """The random states of a checkpoint."""
    return torch.load(folder / "trainer.pt", weights_only=True)["rng_state"]


@pytest.mark.parametrize("changes", [EP2, pytest.param(KEPT, marks=pytest.mark.slow)], ids=["ep2", "kept"])
def test_training_does_not_notice_and_a_resumed_run_evaluates_the_same(changes, world, tmp_path):  # noqa: F811
    common = changes | {"training__train_iters": 3, "training__save_interval": 2}
    asked = common | {"training__eval_interval": 2, "training__eval_iters": 1}
    plain = launch(2, world, tmp_path / "a", **common)
    trained, found = apart(launch(2, world, tmp_path / "b", **asked))
    assert exact(trained) == exact(plain)
    one, other = (tmp_path / name / "ck" / "iter_0000003" for name in "ab")
    assert same(stock(one), stock(other)) and same(states(one), states(other))
    assert sorted(found) == [2, 3] and found[2][1] == found[3][1] and found[2][0] != found[3][0]
    start = {"training__load": str(tmp_path / "b" / "ck" / "iter_0000002")}
    trained, later = apart(launch(2, world, tmp_path / "c", **asked | start))
    assert exact(trained) == exact(plain[2:]) and later == {3: found[3]}


def test_what_a_run_says_of_its_split_before_it_starts(world, tmp_path):  # noqa: F811
    def planned(**changes: Any) -> list[str]:
        basic = "data__dataset_param__basic_parameters__"
        keys = {(basic if key.startswith("val_") else "training__") + key: value for key, value in changes.items()}
        found = plan(load_config(configuration(world, tmp_path, **keys)), 1, "cpu")
        return [line for line in found.lines if line.startswith("validation: ")]

    rows = json.loads(with_split(world).read_text())["dataset_param"]["basic_parameters"]["val_dataset"]
    assert planned() == planned(eval_interval=3, val_rate=0.5) == []
    told = "validation: {} is not evaluated; training.eval_interval asks for it"
    assert planned(val_dataset=rows) == [told.format(f"val_dataset {rows}")]
    assert planned(val_rate=0.5) == [told.format("val_rate 0.5")]
    for told, changes in (
        ("training.eval_interval 3: val_dataset and val_rate are null.*Name a file in", {"eval_interval": 3}),
        ("training.eval_interval 3: .*none.json", {"eval_interval": 3, "val_dataset": "none.json"}),
        ("eval_iters without eval_interval", {"eval_iters": 3, "val_rate": 0.5}),
    ):
        with pytest.raises(UserError, match=told):
            planned(**changes)
