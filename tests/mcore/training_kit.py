"""What the training tests share: the quickstart's checkpoint and data, flags for a run, and runs on fresh processes.

`launch` runs the real entry script's callbacks through `pretrain` on n forked processes and returns the metrics file;
`reference` is a plain Hugging Face training loop over the same samples.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_models.config.data import load_data_config
from mm_models.config.model import load_model_config
from mm_models.data.collator import NEEDS
from mm_models.data.loader import build_loader
from mm_models.train.log import read_metrics
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
            section = (
                value["dataloader_param"]
                if key in value["dataloader_param"]
                else value["dataset_param"]["basic_parameters"]
            )
            section[key] = new
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(value))
        return path

    def flags(
        self,
        *extra: str,
        steps: int = STEPS,
        model: Path | None = None,
        data: Path | None = None,
        start: str | None = "hf",
        micro: int = 1,
        rate: float = RATE,
    ) -> list[str]:
        """The flags of a run; `start` is a folder, "hf" for the checkpoint, None for none (give --from-scratch)."""
        flags = ["--mm-model", str(model or self.model()), "--mm-data", str(data or self.folder / "data" / "data.json")]
        flags += ["--micro-batch-size", str(micro), "--global-batch-size", str(BATCH), "--train-iters", str(steps)]
        flags += [
            "--lr",
            str(rate),
            "--weight-decay",
            str(DECAY),
            "--clip-grad",
            str(CLIP),
            "--distributed-timeout-minutes",
            "1",
        ]
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


def reference_case(
    rank: int, model: str, data: str, hf: str, steps: int, micro: int, loss_type: str, rate: float
) -> dict[str, Any]:
    """Plain Hugging Face training: losses, norms and final weights. A parameter without a gradient is stepped with zeros."""
    from transformers import Glm4vMoeForConditionalGeneration

    network = Glm4vMoeForConditionalGeneration.from_pretrained(hf, attn_implementation="sdpa", dtype=torch.float32)
    network.set_experts_implementation("grouped_mm")
    network.train()
    batches = iter(
        build_loader(
            load_data_config(data),
            model_config=load_model_config(model),
            micro_batch_size=micro,
            global_batch_size=BATCH,
        )
    )
    decayed = [p for n, p in network.named_parameters() if p.ndim > 1]
    vectors = [p for n, p in network.named_parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}], lr=rate
    )
    records = []
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = rate * (1 - step / steps)
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


def reference(
    world: World, *, steps: int = STEPS, micro: int = 1, loss_type: str = "default", rate: float = RATE
) -> dict[str, Any]:
    data = world.folder / "data" / "data.json"
    (result,) = run(
        reference_case, 1, str(world.model()), str(data), str(world.hf), steps, micro, loss_type, rate, timeout=90
    )
    return result


# --- synthetic samples: no processor, no images on disk, every sample a function of its id ------------------------------


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A datasets provider over `total` samples of the tiny GLM-4.5V, shuffled, or over `order` as it stands.

    Every third sample has no image. `unlabelled` ids have no label. `record` is a folder each rank writes its sample ids into.
    `poison` = (step, rank): that rank's pixels hold a NaN in that step. `terminate` = (step, rank): that rank gets SIGTERM then.
    """

    total: int = 23
    order: tuple[int, ...] | None = None
    unlabelled: frozenset[int] = frozenset()
    record: str | None = None
    poison: tuple[int, int] | None = None
    terminate: tuple[int, int] | None = None

    def __call__(self, samples, *, consumed_samples: int, needs: frozenset[str]):
        return self._stream(consumed_samples, needs), None, None

    def _stream(self, consumed: int, needs: frozenset[str]):
        from mm_models.data.sampler import BaseRandomBatchSampler
        from mm_models.mcore.session import current

        session = current()
        sampler = BaseRandomBatchSampler(
            len(self.order) if self.order else self.total,
            micro_batch_size=session.plan.args.micro_batch_size,
            global_batch_size=session.plan.global_batch_size,
            dp_rank=session.coords.dp,
            dp_size=session.layout.dp,
            seed=session.plan.args.seed,
            consumed_samples=consumed,
            shuffle=self.order is None,
        )
        for places in sampler:
            here = session.position.step, session.rank
            ids = [self.order[place] for place in places] if self.order else places
            if self.record:
                with open(f"{self.record}/rank{session.rank}.txt", "a") as file:
                    file.write(f"{session.position.step} {' '.join(map(str, ids))}\n")
            if here == self.terminate:
                os.kill(os.getpid(), signal.SIGTERM)
            made = self.micro_batch(ids, needs)
            if here == self.poison and "pixel_values" in made:
                made["pixel_values"][0, 0] = float("nan")
            yield made

    def micro_batch(self, ids: list[int], needs: frozenset[str] = NEEDS) -> dict[str, Any]:
        """Each sample is a function of its id; all have the same length."""
        from tests.mcore.batches import batch

        samples = [batch(id, images=[[] if id % 3 == 0 else [(4, 4)]], unlabelled=id in self.unlabelled) for id in ids]
        made: dict[str, Any] = {"sample_ids": list(ids)}
        for key in ("input_ids", "labels", "attention_mask", "image_grid_thw", "pixel_values"):
            parts = [sample[key] for sample in samples if key in sample]
            if parts:
                made[key] = torch.cat(parts)
        made["position_ids"] = torch.cat([sample["position_ids"] for sample in samples], dim=1)
        dropped = {"pixels": "pixel_values", "labels": "labels", "grid": "image_grid_thw"}
        return {
            key: value for key, value in made.items() if key not in {dropped[need] for need in dropped.keys() - needs}
        }


def tiny_files(folder: Path, *, family: str = "glm4v_moe", **sections: dict[str, Any]) -> list[str]:
    """--mm-model of a tiny model (GLM-4.5V; with `sections` updated) and a valid --mm-data that no run opens."""
    from tests.data.kit import BASE
    from tests.models import tiny_config

    data = model_config(tiny_config(family)).model_dump(mode="json", exclude_none=True)
    places = data["image_encoder"] | {"text_decoder": data["text_decoder"]}
    for section, change in sections.items():
        places[section].update(change) if section in places else data.__setitem__(section, change)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(data))
    (folder / "data.json").write_text(BASE)
    return ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")]


def tiny_flags(
    folder: Path,
    *extra: str,
    steps: int = STEPS,
    batch: int = BATCH,
    family: str = "glm4v_moe",
    **sections: dict[str, Any],
) -> list[str]:
    """Flags of a run of a tiny model (GLM-4.5V); give --from-scratch or --load."""
    flags = [
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        str(batch),
        "--train-iters",
        str(steps),
        "--lr",
        str(RATE),
    ]
    return [*tiny_files(folder, family=family, **sections), *flags, "--distributed-timeout-minutes", "1", *extra]


def train_synthetic(rank: int, argv: list[str], provider: Synthetic) -> str | None:
    """A run over synthetic samples in this process, with the entry script's other callbacks. A stop by signal is returned as text."""
    import pretrain_vlm as entry
    from mm_models.mcore.arguments import parse
    from mm_models.mcore.training import pretrain
    from mm_models.train.entry import StoppedBySignal

    try:
        pretrain(provider, entry.model_provider, entry.forward_step, parse(argv))
    except StoppedBySignal as stop:
        return str(stop)


def launch_synthetic(
    nprocs: int, argv: list[str], metrics: Path, provider: Synthetic | None = None, *, timeout: float = 60
) -> list[dict]:
    """`train_synthetic` on `nprocs` processes; one record an iteration."""
    run(train_synthetic, nprocs, [*argv, "--log-metrics", str(metrics)], provider or Synthetic(), timeout=timeout)
    return read_metrics(metrics)


def _listen(rank: int, argv: list[str], provider: Synthetic) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_synthetic(rank, argv, provider)
    return said.getvalue()


def printed(nprocs: int, argv: list[str], provider: Synthetic | None = None, *, timeout: float = 60) -> list[str]:
    """What each rank of a run prints."""
    return run(_listen, nprocs, argv, provider or Synthetic(), timeout=timeout)
