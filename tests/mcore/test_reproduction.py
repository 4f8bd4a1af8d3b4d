"""The rule by which the field reproduces a run on fewer devices: TP and PP as they were, DP halved, accumulation doubled.

The run of the field's own test: TP2 · PP2, micro-batch 1, accumulation 2, 3 steps, seed 42, no --load, 20 samples in file order, the
distributed optimizer. A global batch is the same samples either way. With accumulation 2 the four gradients are added in another
order, (a + c) + (b + d) instead of ((a + b) + c) + d: what no such sum has touched is bit-equal, the first loss, and six
significant digits are the rest. With accumulation 1 the sum is a + b either way: every loss is bit-equal, norms to seven digits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_models.config.family import family_of
from tests.data.kit import quickstart
from tests.mcore.training_kit import launch

FAMILY = "qwen2_5_vl"
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model.json with everything trained, data.json in file order, 20 samples."""
    folder = tmp_path_factory.mktemp("reproduction")
    quickstart("make_checkpoint").write_checkpoint(folder / "hf", family=FAMILY)
    quickstart("make_data").write_data(folder / "data", folder / "hf", template="qwen2vl")
    config = json.loads((folder / "hf" / "config.json").read_text())
    model = family_of(config, "config.json").model_json(config)
    model["image_encoder"]["vision_encoder"]["freeze"] = False
    (folder / "model.json").write_text(json.dumps(model))
    data = json.loads((folder / "data" / "data.json").read_text())
    data["dataloader_param"]["shuffle"] = False
    data["dataset_param"]["basic_parameters"]["max_samples"] = 20
    (folder / "data.json").write_text(json.dumps(data))
    return folder


def train(folder: Path, dp: int, global_batch: int, *extra: str) -> list[dict]:
    flags = ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json"), "--from-scratch"]
    flags += ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
    flags += ["--global-batch-size", str(global_batch), "--train-iters", str(STEPS), "--seed", "42", "--lr", "1e-3"]
    flags += ["--clip-grad", "1.0", "--distributed-timeout-minutes", "2", *extra]
    records = launch(4 * dp, flags, folder / f"dp{dp}-{global_batch}-{len(extra)}.jsonl", timeout=200)
    assert [record["iteration"] for record in records] == list(range(1, STEPS + 1))
    return records


def figures(records: list[dict], key: str) -> list[float]:
    return [record[key] for record in records]


@pytest.mark.slow
def test_dp2_is_dp1_with_accumulation_doubled(folder):
    two = train(folder, 2, 4, "--use-distributed-optimizer")
    one = train(folder, 1, 4, "--use-distributed-optimizer")
    for key in ("loss", "grad_norm"):
        assert figures(two, key) == pytest.approx(figures(one, key), rel=1e-6)
    assert two[0]["loss"] == one[0]["loss"]
    assert len(set(figures(one, "loss"))) == STEPS


@pytest.mark.slow
def test_losses_are_bit_equal_where_the_order_of_the_sum_is_the_same(folder):
    two, one = train(folder, 2, 2), train(folder, 1, 2)
    assert figures(two, "loss") == figures(one, "loss")
    assert figures(two, "grad_norm") == pytest.approx(figures(one, "grad_norm"), rel=1e-7)
