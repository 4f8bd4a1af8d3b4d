from __future__ import annotations

from functools import cache

import pytest

import tests.harness  # noqa: F401  its preloaded forkserver starts the loader's workers in no time
from mm_models.data.examine import Examiner, make_processor, make_template
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


@pytest.fixture(scope="session")
def processors(folders):
    """The processor of a family, with pixel bounds."""

    @cache
    def made(family, **bounds):
        return load_processor(folders(family), **bounds)

    return made


@pytest.fixture
def examine(folders, processors, tmp_path):
    """What a row becomes; images are relative to `tmp_path`, a change goes into data.json."""

    def run(row, *, family="glm4v_moe", decode=True, **changes):
        config = kit.data_config(folders(family), tmp_path, template=kit.TEMPLATES[family], **changes)
        bounds = {key: value for key, value in changes.items() if key in ("image_min_pixels", "image_max_pixels")}
        processor = make_processor(config) if bounds else processors(family)
        template = make_template(config, processor)
        return Examiner(config, processor, template, base=str(tmp_path), decode=decode).examine(0, row)

    return run
