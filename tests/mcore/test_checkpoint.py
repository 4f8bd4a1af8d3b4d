"""Saving and resuming: exact to the bit, at another DP and another topology, and nothing that is wrong goes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mm_models.weights.manifest import open_checkpoint
from tests.harness import CaseFailed
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import Synthetic, launch_synthetic, tiny_flags

EXACT = ("iteration", "consumed_samples", "learning_rate", "next_learning_rate", "loss", "grad_norm", "tokens", "labelled_tokens")
SCHEDULE = ("--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--min-lr", "1e-5", "--weight-decay", "0.1")


def exact(records: list[dict]) -> list[tuple]:
    return [tuple(record[key] for key in EXACT) for record in records]


def crcs(folder: Path, step: int) -> dict:
    """Every tensor and moment of a checkpoint, by place, with its CRC."""
    manifest = open_checkpoint(folder, step).manifest
    found = {(e.file, e.container, e.key): e.crc32 for e in manifest.tensors}
    return found | {(m.file, m.name, m.part, m.range): m.crc32 for m in manifest.optimizer}


CASES = {
    "tp1": (1, topology()),
    "tp1-bf16": (1, ["--bf16"]),
    "dp2": (2, topology()),
    "dp2-distributed-bf16": (2, [DISTRIBUTED, "--bf16"]),
    "pp2-vpp2": (2, topology(pp=2, vpp=2)),
    "ep2-distributed": (2, [*topology(ep=2), DISTRIBUTED]),
    "tp2-etp1-ep2-pp2": (4, [*topology(tp=2, etp=1, ep=2, pp=2), SP]),
    "tp2-etp1-dp2-distributed": (4, [*topology(tp=2, etp=1), SP, DISTRIBUTED]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(name, tmp_path):
    nprocs, flags = CASES[name]
    argv = tiny_flags(tmp_path, *flags, *SCHEDULE, steps=6)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = launch_synthetic(nprocs, [*argv, "--from-scratch", "--save", str(whole), "--save-interval", "3"], tmp_path / "a.jsonl")
    resumed = launch_synthetic(nprocs, [*argv, "--load", str(whole), "--ckpt-step", "3", "--save", str(broken)], tmp_path / "b.jsonl")
    assert [r["iteration"] for r in resumed] == [4, 5, 6]
    assert exact(resumed) == exact(unbroken[3:])
    assert crcs(broken, 6) == crcs(whole, 6)
    assert {child.name for child in broken.iterdir()} == {"iter_0000006", "latest_checkpointed_iteration.txt"}
    for file in whole.glob("iter_*/*/*.pt"):  # plain data only
        torch.load(file, weights_only=True)
