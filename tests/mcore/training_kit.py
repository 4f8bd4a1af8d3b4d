"""What the training tests share: the quickstart's checkpoint and data, flags for a run, and runs on fresh processes.

`launch` runs the real entry script's callbacks through `pretrain` on n forked processes and returns the metrics file;
`reference` is a plain Hugging Face training loop over the same samples.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_models.config.data import load_data_config
from mm_models.config.model import load_model_config
from mm_models.data.loader import build_loader
from mm_models.mcore.log import read_metrics
from tests.data.kit import quickstart
from tests.harness import run
from tests.mcore.batches import hf_inputs
from tests.mcore.oracle import model_config

STEPS, BATCH, RATE, DECAY, CLIP = 4, 4, 1e-3, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class World:
    """A folder with `hf` (checkpoint), `data/data.json`, and room for runs."""

    folder: Path

    @property
    def hf(self) -> Path:
        return self.folder / "hf"

    def model(self, name: str = "model", **sections: dict[str, Any]) -> Path:
        """model.json, with `sections` (vision_encoder, vision_projector, text_decoder, loss_cfg) updated."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.hf)
        data = model_config(config).model_dump(mode="json", exclude_none=True)
        data |= {"video_token_id": config.video_token_id, "vision_start_token_id": config.image_start_token_id}
        places = data["image_encoder"] | {"text_decoder": data["text_decoder"]}
        for section, change in sections.items():
            places[section].update(change) if section in places else data.__setitem__(section, change)
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(data))
        return path

    def data(self, name: str = "data", **basic: Any) -> Path:
        """data.json, with loader keys and basic_parameters updated."""
        value = json.loads((self.folder / "data" / "data.json").read_text())
        for key, new in basic.items():
            section = value["dataloader_param"] if key in value["dataloader_param"] else value["dataset_param"]["basic_parameters"]
            section[key] = new
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(value))
        return path

    def flags(self, *extra: str, steps: int = STEPS, model: Path | None = None, data: Path | None = None, start: str | None = "hf", micro: int = 1) -> list[str]:
        """The flags of a run; `start` is a folder, "hf" for the checkpoint, None for none (give --from-scratch)."""
        flags = ["--mm-model", str(model or self.model()), "--mm-data", str(data or self.folder / "data" / "data.json")]
        flags += ["--micro-batch-size", str(micro), "--global-batch-size", str(BATCH), "--train-iters", str(steps)]
        flags += ["--lr", str(RATE), "--weight-decay", str(DECAY), "--clip-grad", str(CLIP), "--distributed-timeout-minutes", "1"]
        flags += ["--load", str(self.hf if start == "hf" else start)] if start else []
        return [*flags, *extra]


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("quickstart")
    quickstart("make_checkpoint").write_checkpoint(folder / "hf")
    quickstart("make_data").write_data(folder / "data", folder / "hf")
    return World(folder=folder)


def train(rank: int, argv: list[str]) -> None:
    """A run in this process, as the entry script makes it."""
    import pretrain_vlm as entry
    from mm_models.mcore.arguments import parse
    from mm_models.mcore.training import pretrain

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pretrain(entry.train_valid_test_datasets_provider, entry.model_provider, entry.forward_step, parse(argv))


def launch(nprocs: int, argv: list[str], metrics: Path, *, timeout: float = 90) -> list[dict]:
    """Train on `nprocs` processes; one record an iteration."""
    run(train, nprocs, [*argv, "--log-metrics", str(metrics)], timeout=timeout)
    return read_metrics(metrics)


def reference_case(rank: int, model: str, data: str, hf: str, steps: int, micro: int, loss_type: str) -> dict[str, Any]:
    """Plain Hugging Face training: losses, norms and final weights. A parameter without a gradient is stepped with zeros."""
    from transformers import Glm4vMoeForConditionalGeneration

    network = Glm4vMoeForConditionalGeneration.from_pretrained(hf, attn_implementation="sdpa", dtype=torch.float32)
    network.set_experts_implementation("grouped_mm")
    network.train()
    batches = iter(build_loader(load_data_config(data), model_config=load_model_config(model), micro_batch_size=micro, global_batch_size=BATCH))
    decayed = [p for n, p in network.named_parameters() if p.ndim > 1]
    vectors = [p for n, p in network.named_parameters() if p.ndim == 1]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], lr=RATE)
    records = []
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        window = [next(batches) for _ in range(BATCH // micro)]
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in window]
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for batch, count in zip(window, counts):
            loss = network(**hf_inputs(batch), labels=batch["labels"]).loss
            part = loss * count / sum(counts) if loss_type == "per_token_loss" else loss / len(window)
            part.backward()
            total += part.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP).item()
        adam.step()
        records.append({"loss": total, "grad_norm": norm, "ids": [id for b in window for id in b["sample_ids"]]})
    return {"records": records, "weights": {name: p.detach() for name, p in network.named_parameters()}}


def reference(world: World, *, steps: int = STEPS, micro: int = 1, loss_type: str = "default") -> dict[str, Any]:
    data = world.folder / "data" / "data.json"
    (result,) = run(reference_case, 1, str(world.model()), str(data), str(world.hf), steps, micro, loss_type, timeout=90)
    return result
