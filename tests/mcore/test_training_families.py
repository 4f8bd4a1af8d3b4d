"""Whole runs of the new families: the losses and norms of a plain Hugging Face loop on several topologies, replicas compared at
every step, and a checkpoint that another topology goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run
from tests.mcore.batches import hf_sum_loss
from tests.mcore.test_families import FAMILIES
from tests.mcore.test_training import DISTRIBUTED, SP, agree, topology
from tests.mcore.training_kit import BATCH, CLIP, DECAY, RATE, Synthetic, launch_synthetic, tiny_flags
from tests.models import tiny_model
from tests.weights.folders import hf_folder, resplit

STEPS = 3
ORDER = tuple(range(BATCH * STEPS))
TRAINED = {"vision_encoder": {"freeze": False}}
SAVE = ["--save-interval", "2", "--save"]
WATCHED = ["--clip-grad", str(CLIP), "--weight-decay", str(DECAY), "--check-replicas", "1"]

TOPOLOGIES = {
    "tp2-sp-pp2": (4, [*topology(tp=2, pp=2), SP]),
    "tp2-dp2-distributed": (4, [*topology(tp=2), DISTRIBUTED]),
    "pp2-vpp2-dp2": (4, [*topology(pp=2, vpp=2), DISTRIBUTED]),
}


def reference_case(rank: int, family: str) -> list[dict]:
    """Hugging Face's model under AdamW over the same samples."""
    network = tiny_model(family).train()
    wide = [p for p in network.parameters() if p.ndim > 1]
    flat = [p for p in network.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW([{"params": wide, "weight_decay": DECAY}, {"params": flat, "weight_decay": 0.0}], lr=RATE)
    records = []
    for step in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = RATE * (1 - step / STEPS)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for id in ORDER[step * BATCH : (step + 1) * BATCH]:
            batch = Synthetic().micro_batch([id])
            count = int((batch["labels"][:, 1:] != -100).sum())
            part = hf_sum_loss(network, batch)[1] / count / BATCH
            part.backward()
            total += part.item()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP).item()
        adam.step()
        records.append({"iteration": step + 1, "loss": total, "grad_norm": norm})
    return records


def flags(folder: Path, family: str, *extra: str) -> list[str]:
    return tiny_flags(folder, *WATCHED, *extra, steps=STEPS, family=family, **TRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_equal_a_plain_hugging_face_loop(family, tmp_path):
    hf = hf_folder(tmp_path / "hf", dtype=torch.float32, family=family)
    (expected,) = run(reference_case, 1, family, timeout=60)
    samples = Synthetic(order=ORDER)
    for name, (processes, degrees) in TOPOLOGIES.items():
        argv = flags(tmp_path / name, family, "--load", str(hf), *degrees)
        agree(launch_synthetic(processes, argv, tmp_path / f"{name}.jsonl", samples, timeout=90), expected)
    argv = flags(
        tmp_path / "first", family, "--load", str(hf), *TOPOLOGIES["tp2-sp-pp2"][1], *SAVE, str(tmp_path / "saved")
    )
    launch_synthetic(4, argv, tmp_path / "first.jsonl", samples, timeout=90)
    other = resplit(tmp_path / "saved" / "iter_0000002", tmp_path / "other", pp=2, vpp=2)
    argv = flags(tmp_path / "second", family, "--load", str(other), *TOPOLOGIES["pp2-vpp2-dp2"][1])
    (last,) = launch_synthetic(4, argv, tmp_path / "second.jsonl", samples, timeout=90)
    assert last["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-5)
    assert last["grad_norm"] == pytest.approx(expected[-1]["grad_norm"], rel=1e-4)
