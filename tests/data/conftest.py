from __future__ import annotations

from functools import cache

import pytest

import tests.harness  # noqa: F401  its preloaded forkserver starts the loader's workers in no time
from mm_models.data.processor import load_processor
from mm_models.data.templates.glm4v_moe import Glm4vMoeTemplate
from tests.data import kit


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The processor folder of a family; read-only by convention."""

    @cache
    def made(family):
        return kit.processor_folder(tmp_path_factory.mktemp("processor") / family, family)

    return made


@pytest.fixture(scope="session")
def folder(folders):
    """GLM-4.5V's."""
    return folders("glm4v_moe")


@pytest.fixture(scope="session")
def processor(folder):
    return load_processor(folder)


@pytest.fixture(scope="session")
def template(processor):
    return Glm4vMoeTemplate(processor, name="glm4v_moe")
