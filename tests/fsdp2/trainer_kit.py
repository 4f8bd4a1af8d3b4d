"""What the tests of the FSDP2 trainer share: a tiny checkpoint, its configuration, runs on fresh processes, and plain training.

`launch` runs `train` on n forked processes over synthetic samples and returns the metrics file; `reference` is a plain Hugging Face
loop over the same samples.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mm_models.config.fsdp2 import RunConfig
from mm_models.config.strict import validate
from mm_models.train.log import read_metrics
from tests.harness import run
from tests.mcore import training_kit
from tests.mcore.batches import hf_inputs
from tests.models import tiny_model

STEPS, RATE, DECAY, CLIP = 4, 1e-3, 0.1, 1.0
FSDP = ["model.visual", "model.visual.blocks.{*}", "model.language_model", "model.language_model.embed_tokens"]
FSDP += ["model.language_model.layers.{*}", "lm_head"]
EXPERTS = ["model.language_model.layers.{*}.mlp.experts"]
BF16 = {"parallel.fsdp_plan.param_dtype": "bf16", "parallel.fsdp_plan.reduce_dtype": "fp32"}


def write_hf(folder: Path, family: str = "glm4v_moe", **overrides: Any) -> Path:
    """A family's tiny model as a Hugging Face folder, named as Hugging Face saves it."""
    tiny_model(family, **overrides).save_pretrained(folder)
    return folder


def config(hf: Path, **changes: Any) -> dict[str, Any]:
    """A whole configuration over `hf` as a dict; `changes` are dotted keys with `__` for the dot, or given by `changed`."""
    (hf / "rows.json").write_text("[]")
    family = json.loads((hf / "config.json").read_text())["model_type"]
    raw = {
        "parallel": {
            "fsdp_plan": {"apply_modules": FSDP},
            "ep_plan": {"apply_modules": EXPERTS if family == "glm4v_moe" else []},
        },
        "data": {
            "dataset_param": {
                "dataset_type": "huggingface",
                "preprocess_parameters": {"model_name_or_path": str(hf)},
                "basic_parameters": {"cutoff_len": 64, "template": "glm4v_moe", "dataset": str(hf / "rows.json")},
            },
            "dataloader_param": {"collate_param": {"collator_id": "qwen3vl"}},
        },
        "model": {"model_id": family, "model_name_or_path": str(hf)},
        "training": {
            "train_iters": STEPS, "lr": RATE, "weight_decay": DECAY, "clip_grad": CLIP, "load": str(hf),
            "distributed_timeout_minutes": 1,
        },
    }  # fmt: skip
    return changed(raw, {key.replace("__", "."): value for key, value in changes.items()})


def changed(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with dotted keys set."""
    raw = deepcopy(dict(raw))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = raw
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return raw


@dataclass(frozen=True, kw_only=True)
class Uneven(training_kit.Synthetic):
    """The other target's samples, each with a number of labels of its own: the loss types differ."""

    def micro_batch(self, ids: list[int], *needs: frozenset[str]) -> dict[str, Any]:
        made = super().micro_batch(ids, *needs)
        for row, id in zip(made.get("labels", ()), ids):
            row[: 13 + 5 * (id % 5)] = -100
        return made


@dataclass(frozen=True, kw_only=True)
class Synthetic(Uneven):
    """Stands for `build_loader`: see the fields of the other target's kit."""

    def __call__(
        self,
        data_config,
        *,
        model_config,
        dp_rank,
        dp_size,
        micro_batch_size,
        global_batch_size,
        seed,
        consumed_samples,
    ):
        from mm_models.data.sampler import BaseRandomBatchSampler

        sampler = BaseRandomBatchSampler(
            len(self.order) if self.order else self.total,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=seed,
            consumed_samples=consumed_samples,
            shuffle=self.order is None,
        )
        return _Loader(self, sampler)


class _Loader:
    def __init__(self, samples: Synthetic, sampler):
        self.samples, self.sampler = samples, sampler

    def lines(self) -> list[str]:
        return []

    def __iter__(self):
        from mm_models.train.session import current

        samples, session = self.samples, current()
        for places in self.sampler:
            here = session.position.step, session.rank
            ids = [samples.order[place] for place in places] if samples.order else places
            if samples.record:
                with open(f"{samples.record}/rank{session.rank}.txt", "a") as file:
                    file.write(f"{session.position.step} {' '.join(map(str, ids))}\n")
            if here == samples.terminate:
                os.kill(os.getpid(), signal.SIGTERM)
            made = samples.micro_batch(ids)
            if here == samples.poison and "pixel_values" in made:
                made["pixel_values"][0, 0] = float("nan")
            yield made


def train(rank: int, raw: Mapping[str, Any], samples: Synthetic) -> str | None:
    """A run in this process over synthetic samples. A stop by signal is returned as text."""
    from mm_models.fsdp2 import training, validation
    from mm_models.train.entry import StoppedBySignal
    from mm_models.train.session import world_size

    training.build_loader = samples
    plan = validation.plan(validate(RunConfig, raw, "the test"), world_size(), "cpu")
    try:
        training.train(plan)
    except StoppedBySignal as stop:
        return str(stop)


def launch(
    nprocs: int, raw: Mapping[str, Any], metrics: Path, samples: Synthetic | None = None, *, timeout: float = 120
) -> list[dict]:
    """`train` on `nprocs` processes; one record an iteration."""
    raw = changed(raw, {"training.log_metrics": str(metrics)})
    run(train, nprocs, raw, samples or Synthetic(), timeout=timeout)
    return read_metrics(metrics)


def _listen(rank: int, raw: Mapping[str, Any], samples: Synthetic) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(rank, raw, samples)
    return said.getvalue()


def printed(
    nprocs: int, raw: Mapping[str, Any], samples: Synthetic | None = None, *, timeout: float = 120
) -> list[str]:
    """What each rank of a run prints."""
    return run(_listen, nprocs, raw, samples or Synthetic(), timeout=timeout)


def reference(
    hf: Path, *, steps: int, batch: int, micro: int = 1, loss_type: str = "default", samples: Synthetic | None = None,
    rate: float = RATE,
) -> dict[str, Any]:  # fmt: skip
    """Plain Hugging Face training, linear rate to 0 excluded: losses, norms, final weights. `batch` samples a step, `micro` a
    forward; no gradient is a zero gradient; micro-batches without label are left out."""
    return run(_reference, 1, str(hf), steps, batch, micro, loss_type, samples or Synthetic(), rate, timeout=90)[0]


def _reference(rank: int, hf: str, steps: int, batch: int, micro: int, loss_type: str, samples: Synthetic, rate: float):
    from transformers import AutoModelForImageTextToText

    from mm_models.data.sampler import BaseRandomBatchSampler

    network = AutoModelForImageTextToText.from_pretrained(hf, attn_implementation="sdpa", dtype=torch.float32)
    if hasattr(network.config.text_config, "n_routed_experts"):
        network.set_experts_implementation("grouped_mm")
    network.train()
    sampler = iter(
        BaseRandomBatchSampler(
            len(samples.order) if samples.order else samples.total,
            micro_batch_size=micro,
            global_batch_size=batch,
            dp_rank=0,
            dp_size=1,
            seed=1234,
            consumed_samples=0,
            shuffle=samples.order is None,
        )
    )
    named = dict(network.named_parameters())
    decays = [p for n, p in named.items() if p.ndim > 1]
    adam = torch.optim.AdamW(
        [{"params": decays, "weight_decay": DECAY},
         {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}], lr=rate,
    )  # fmt: skip
    records = []
    for _ in range(steps):
        ids = [next(sampler) for _ in range(batch // micro)]
        window = [
            samples.micro_batch([samples.order[at] for at in places] if samples.order else places) for places in ids
        ]
        counts = [int((made["labels"][:, 1:] != -100).sum()) for made in window]
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for made, count in zip(window, counts):
            if not count:
                continue
            loss = network(**hf_inputs(made), labels=made["labels"]).loss
            part = loss * count / sum(counts) if loss_type == "per_token_loss" else loss / sum(n > 0 for n in counts)
            part.backward()
            total += part.item()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), CLIP).item()
        adam.step()
        records.append({"loss": total, "grad_norm": norm})
    return {"records": records, "weights": {name: p.detach() for name, p in named.items()}}


def stock(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a DCP folder by key, read by torch's own reader in one process."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(folder)
    meta = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in meta.items()}
    _load_state_dict(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    return state


def assert_same_step(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], *, steps: int) -> None:
    """Two states of a model after `steps` steps of full size at `RATE`, by DCP key or name, up to rounding.

    The bias of the keys has next to no gradient, and AdamW makes steps of full size of what is rounding alone.
    """
    assert got.keys() == want.keys()
    for key, value in want.items():
        if "exp_avg" in key:
            limit = 1e-4 * float(value.abs().max()) + 1e-12
        else:
            limit = RATE * steps if key.endswith("k_proj.bias") else 0.05 * RATE * steps
        worst = float((got[key] - value).abs().max())
        assert worst <= limit, (key, worst, limit)


def manifest(folder: Path) -> dict[str, Any]:
    """manifest.json of a checkpoint folder."""
    return json.loads((folder / "manifest.json").read_text())
