"""`patch.bridge_patch`: a run that says so starts from a Hugging Face folder, on any topology, as if it had been converted first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.validation import plan
from tests.mcore.training_kit import launch_synthetic, tiny_flags
from tests.weights.folders import hf_folder, to_mm

FAMILY, WORLD = "qwen2_5_vl", 4
ON, OFF = {"bridge_patch": True}, {"bridge_patch": False}
VIDEO = {"tokens_per_second": 2}  # what the folder says; compared, though images alone are read
TOPOLOGY = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("bridge") / "hf", dtype=torch.float32, family=FAMILY)


@pytest.fixture(scope="module")
def release(hf, tmp_path_factory) -> Path:
    return to_mm(hf, tmp_path_factory.mktemp("bridge") / "mm", vision=[4, 0], text=[2, 2], tp=2, pp=2)


def flags(folder: Path, patch: dict, *extra: str, steps: int = 3) -> list[str]:
    return tiny_flags(folder, *TOPOLOGY, *extra, steps=steps, family=FAMILY, patch=patch, vision_encoder=VIDEO)


def planned(folder: Path, patch: dict, *extra: str):
    return plan(parse(flags(folder, patch, *extra)), WORLD)


def test_what_it_may_load(hf, release, tmp_path):
    assert planned(tmp_path, ON, "--load", str(hf)).model.patch.bridge_patch
    for where in (hf, release):
        planned(tmp_path, OFF, "--load", str(where))


@pytest.mark.parametrize("kind", ["release", "finetune", "scratch", "nowhere", "empty"])
def test_what_it_may_not(kind, release, tmp_path):
    (tmp_path / "empty").mkdir()
    where = {"release": release, "finetune": release, "nowhere": tmp_path / "none", "empty": tmp_path / "empty"}.get(
        kind
    )
    extra = ["--from-scratch"] if where is None else ["--load", str(where)]
    extra += ["--finetune"] if kind == "finetune" else []
    with pytest.raises(UserError) as caught:
        planned(tmp_path, ON, *extra)
    words = "model.json: patch.bridge_patch is true, so --load must name a Hugging Face folder (it is loaded on any topology) "
    words += f"or a training checkpoint to resume; got {where}."
    assert words in str(caught.value)


def test_without_a_source_nothing_starts(tmp_path):
    with pytest.raises(UserError, match="no weights to start from"):
        planned(tmp_path, ON)


@pytest.mark.slow
def test_bridged_is_converted_first_and_resumes(hf, release, tmp_path):
    """Losses and norms bit for bit; then its own checkpoint, on to the same end."""
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    bridged = launch_synthetic(
        WORLD, flags(tmp_path, ON, "--load", str(hf), *save), tmp_path / "bridged.jsonl", timeout=120
    )
    converted = launch_synthetic(
        WORLD, flags(tmp_path, OFF, "--load", str(release)), tmp_path / "converted.jsonl", timeout=120
    )
    assert len(bridged) == 3 and [numbers(r) for r in bridged] == [numbers(r) for r in converted]
    assert bridged[0]["loss"] != bridged[-1]["loss"]
    with pytest.raises(UserError, match="bridge_patch is true"):
        planned(tmp_path, ON, "--load", str(tmp_path / "saved"), "--finetune")
    again = flags(tmp_path, ON, "--load", str(tmp_path / "saved"), "--ckpt-step", "2")
    resumed = launch_synthetic(WORLD, again, tmp_path / "resumed.jsonl", timeout=120)
    assert [numbers(r) for r in resumed] == [numbers(bridged[-1])]


def numbers(record: dict) -> tuple:
    return record["iteration"], record["loss"], record["grad_norm"]
