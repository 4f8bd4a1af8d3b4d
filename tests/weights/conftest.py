"""One tiny folder of each kind, made once per session; tests copy what they change."""

from __future__ import annotations

import pytest
import torch

from tests.weights.folders import hf_folder


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """bf16, per expert, one file: what the hub holds."""
    return hf_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="session")
def hf_stacked(tmp_path_factory):
    """The same model, experts stacked, in several files with an index."""
    return hf_folder(tmp_path_factory.mktemp("hf") / "stacked", stacked=True, shard_size="300KB")


@pytest.fixture(scope="session")
def hf_fp32(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "fp32", dtype=torch.float32, shard_size="500KB")
