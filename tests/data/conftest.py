from __future__ import annotations

from functools import cache

import pytest

import tests.harness  # noqa: F401  its preloaded forkserver starts the loader's workers in no time
from mm_models.data.examine import Examiner
from mm_models.data.processor import load_processor
from mm_models.data.templates.glm4v_moe import Glm4vMoeTemplate
from mm_models.registry import table
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


@pytest.fixture(scope="session")
def templates(processors):
    """The template of a family, with options."""

    @cache
    def made(family, **options):
        name = kit.TEMPLATES[family]
        return table("templates").get(name)(processors(family), name=name, **options)

    return made


@pytest.fixture
def examine(folders, processors, templates, tmp_path):
    """What a row becomes; images are relative to `tmp_path`, a change goes into data.json."""

    def run(row, *, family="glm4v_moe", decode=True, **changes):
        config = kit.data_config(folders(family), tmp_path, template=kit.TEMPLATES[family], **changes)
        picked = {key: {k: changes[k] for k in keys if k in changes} for key, keys in SHAPING.items()}
        processor, template = processors(family, **picked["bounds"]), templates(family, **picked["masks"])
        return Examiner(config, processor, template, base=str(tmp_path), decode=decode).examine(0, row)

    return run


SHAPING = {"bounds": ("image_min_pixels", "image_max_pixels"), "masks": ("mask_history", "train_on_prompt")}
"""Keys of data.json that the processor and the template take."""
