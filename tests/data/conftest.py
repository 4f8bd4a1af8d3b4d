from __future__ import annotations

import pytest

import tests.harness  # noqa: F401  its preloaded forkserver starts the loader's workers in no time
from mm_models.data.processor import load_processor
from mm_models.data.templates.glm4v_moe import Glm4vMoeTemplate
from tests.data import kit


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A processor folder; read-only by convention."""
    return kit.processor_folder(tmp_path_factory.mktemp("processor") / "hf")


@pytest.fixture(scope="session")
def processor(folder):
    return load_processor(folder)


@pytest.fixture(scope="session")
def template(processor):
    return Glm4vMoeTemplate(processor, name="glm4v_moe")
