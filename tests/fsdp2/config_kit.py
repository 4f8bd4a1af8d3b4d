"""The published YAML over tiny folders: one model, with its configuration, a tokenizer, a DCP folder's names and data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_models.config import yaml_file
from mm_models.config.family import family_of_model
from mm_models.config.fsdp2 import RunConfig
from mm_models.config.model import load_model_config
from mm_models.config.strict import validate
from tests.config.fsdp2.kit import SEED
from tests.models import tiny_glm_config

FULL = SEED.with_name("model_106B.json")


def folders(root: Path, hf_config: Mapping[str, Any], name: str = "GLM-4.5V") -> Path:
    """`root` with the paths of a published file, whose model is `name`: everything a plan looks at, no weights."""
    dcp, hf = root / "ckpt/mm_path" / name, root / "ckpt/hf_path" / name
    for folder in (dcp, hf):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(hf_config))
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "truncation": null}')
    (dcp / "latest_checkpointed_iteration.txt").write_text("release")
    (dcp / "release").mkdir()
    (dcp / "release" / ".metadata").write_bytes(b"")
    (dcp / "release" / "manifest.json").write_text('{"expert_layout": "stacked_hf"}')
    (root / "data").mkdir()
    (root / "data" / "mllm_format_llava_instruct_data.json").write_text("[]")
    return root


def tiny_folders(root: Path, **overrides: Any) -> Path:
    """The same for the tiny model of the tests."""
    return folders(root, tiny_glm_config(**overrides).to_dict())


def full_config() -> dict[str, Any]:
    """config.json of the full GLM-4.5V."""
    model = load_model_config(FULL)
    return family_of_model(model).hf_config(model)


def run_config(changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The published file, on as many experts as the tiny model allows on one process, with dotted `changes`."""
    content = yaml_file.load(SEED)
    for key, value in {"parallel.expert_parallel_size": 1, **(changes or {})}.items():
        *parents, last = key.split(".")
        inner = content
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return validate(RunConfig, content, "config.yaml")
