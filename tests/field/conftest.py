"""Folders of the tiny GLM-4.5V, made once per session; tests copy what they change."""

from __future__ import annotations

import pytest
import torch

from tests.field.kit import numbered_experts
from tests.mcore.training_kit import world  # noqa: F401  a fixture
from tests.weights.folders import hf_folder


@pytest.fixture(scope="session")
def hf(tmp_path_factory):
    """fp32, per expert, one file."""
    return hf_folder(tmp_path_factory.mktemp("field") / "hf", dtype=torch.float32)


@pytest.fixture(scope="session")
def numbered(tmp_path_factory):
    """Experts filled with e + 1, input norms with i + 1."""
    return numbered_experts(tmp_path_factory.mktemp("field") / "numbered")
