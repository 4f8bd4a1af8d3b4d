"""The published files over photographs: the first losses and norms are Hugging Face's, which makes its own positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.config.fsdp2 import load_config
from mm_models.train.log import read_metrics
from tests.fsdp2.test_family_files import EXAMPLES, FILES
from tests.harness import run
from tests.mcore.training_kit import quickstart

PLACES = {
    "data.dataset_param.preprocess_parameters.model_name_or_path": "hf",
    "data.dataset_param.basic_parameters.dataset_dir": "data",
    "data.dataset_param.basic_parameters.dataset": "data/train.json",
    "model.model_name_or_path": "hf",
    "training.load": "dcp",
    "training.save": "out",
    "training.log_metrics": "metrics.jsonl",
}
"""Keys of the file that are paths, and where the test has them."""
SMALL = (
    "parallel.fsdp_plan.param_dtype=fp32", "features.chunkloss_plan.chunk_size=16", "training.train_iters=2",
    "training.lr=1e-9", "data.dataset_param.preprocess_parameters.image_max_pixels=25088",
    "data.dataset_param.preprocess_parameters.image_min_pixels=784", "data.dataloader_param.num_workers=0",
)  # fmt: skip
"""A rate at which no weight moves far: every step's loss is that of the checkpoint."""


def case(rank: int, file: str, overrides: list[str]) -> list[tuple[float, float]]:
    """Trains; (loss, gradient norm) of plain Hugging Face on the same samples."""
    from transformers import AutoModelForImageTextToText

    from mm_models.data.loader import build_loader
    from mm_models.fsdp2 import training, validation

    plan = validation.plan(load_config(file, overrides), 1, "cpu")
    training.train(plan)
    config = plan.config
    loader = build_loader(config.data, model_config=plan.model, dp_rank=0, dp_size=1, micro_batch_size=1,
                          global_batch_size=1, seed=config.training.seed, consumed_samples=0)  # fmt: skip
    network = AutoModelForImageTextToText.from_pretrained(config.model.model_name_or_path, dtype=torch.float32)
    found = []
    for part, _ in zip(loader, range(config.training.train_iters)):
        taken = ("input_ids", "attention_mask", "labels", "pixel_values", "image_grid_thw")
        types = (part["input_ids"] == network.config.image_token_id).int()
        network.zero_grad()
        loss = network(
            **{key: part[key] for key in taken if key in part}, mm_token_type_ids=types, use_cache=False
        ).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in network.parameters() if p.grad is not None])
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FILES)
def test_the_first_losses_are_hugging_faces(family, tmp_path: Path):
    template = load_config(EXAMPLES / FILES[family][0]).data.dataset_param.basic_parameters.template
    quickstart("make_checkpoint").write_checkpoint(tmp_path / "hf", family=family)
    quickstart("make_data").write_data(tmp_path / "data", tmp_path / "hf", template)
    assert main(["hf_to_dcp", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "dcp")]) in (0, None)
    overrides = [f"{key}={tmp_path / place}" for key, place in PLACES.items()]
    (want,) = run(case, 1, str(EXAMPLES / FILES[family][0]), [*overrides, *SMALL], timeout=200)
    got = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["loss"] for record in got] == pytest.approx([loss for loss, _ in want], rel=1e-5)
    assert [record["grad_norm"] for record in got] == pytest.approx([norm for _, norm in want], rel=1e-4)
