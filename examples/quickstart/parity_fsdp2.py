"""Hugging Face against the FSDP2 target in one layout: the cases `demo_fsdp2.py` runs on fresh processes.

Each process builds its shards of the model from the YAML, as a training does, loads the Hugging Face folder straight into them, and
compares logits and summed loss of real micro-batches with Hugging Face's model in the same process.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from examples.quickstart.parity import hugging_face, hugging_face_logits, micro_batches, summed_loss, without_labels
from mm_models.config.fsdp2 import load_config
from mm_models.fsdp2 import session, training, validation


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the proof: how many processes, which sizes of the YAML."""

    name: str
    processes: int = 1
    dtype: str = "fp32"
    ep: int = 1
    shard: int | str = "auto"

    def overrides(self) -> list[str]:
        return [
            f"parallel.fully_shard_parallel_size={self.shard}",
            f"parallel.expert_parallel_size={self.ep}",
            f"parallel.fsdp_plan.param_dtype={self.dtype}",
        ]


def compare(rank: int, layout: Layout, paths: dict[str, str], overrides: list[str]) -> dict[str, Any]:
    """On this rank: were logits and losses bit-equal, and the worst relative difference of the logits."""
    torch.set_num_threads(1)
    world = dist.get_world_size()
    config = load_config(paths["yaml"], [*overrides, *layout.overrides()])
    plan = validation.plan(config, world, "cpu")
    with contextlib.redirect_stdout(io.StringIO()):  # the table of a run's start
        trainer, _ = training.set_up(session.start(plan))
    batches = micro_batches(paths, plan.model, equal=layout.ep > 1)
    reference = hugging_face(paths["hf"], {"fp32": torch.float32, "bf16": torch.bfloat16}[layout.dtype])
    equal, worst = True, 0.0
    with torch.no_grad():
        for at in range(len(batches) // world):
            group = batches[at * world : (at + 1) * world]
            logits, loss = trainer.model(without_labels(group[rank])), trainer.model(group[rank])
            peers = group[rank // layout.ep * layout.ep :][: layout.ep]
            expected = hugging_face_logits(reference, peers)[rank % layout.ep][None]
            equal = equal and torch.equal(logits, expected)
            equal = equal and torch.equal(loss, summed_loss(expected, group[rank]["labels"]))
            worst = max(worst, ((logits - expected).float().abs().max() / expected.float().abs().max()).item())
    return {"equal": equal, "worst": worst}
