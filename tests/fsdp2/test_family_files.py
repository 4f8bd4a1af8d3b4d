"""The published files of the dense families with the full-size models: every pattern finds its modules, a dead one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_models.config.fsdp2 import load_config
from mm_models.errors import UserError
from mm_models.fsdp2.validation import plan
from tests.config.fsdp2.kit import SEED
from tests.examples.full_size import GLM, qwen2_5_vl, qwen2_vl
from tests.fsdp2.config_kit import folders

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "qwen2_vl": ("qwen2vl/qwen2vl_7b_config.yaml", "Qwen2-VL-7B-Instruct", qwen2_vl("7b"), 32, 28),
    "qwen2_5_vl": ("qwen2.5vl/qwen2_5vl_7b_config.yaml", "Qwen2.5-VL-7B-Instruct", qwen2_5_vl("7b"), 32, 28),
    "glm4v": ("glm4.1v/glm4_1v_9b_config.yaml", "GLM-4.1V-9B-Thinking", GLM, 24, 40),
}
"""Family -> its file, the name of its folders, config.json, blocks of the tower, layers of the decoder."""
LAYERS, BLOCKS = "model.language_model.layers", "model.visual.blocks"


@pytest.mark.parametrize("family", FILES)
def test_the_file_on_eight_processes(family, tmp_path, monkeypatch):
    """Unmodified, over a flat config.json as the hub has it. A DCP folder without manifest needs no expert layout."""
    file, name, config, blocks, layers = FILES[family]
    monkeypatch.chdir(folders(tmp_path, config, name))
    (tmp_path / "ckpt/mm_path" / name / "release/manifest.json").unlink()
    content = load_config(EXAMPLES / file)
    found = plan(content, 8, "npu")
    assert found.family.model_id == family and "text_config" in found.hf_config
    repeated = (*(f"{BLOCKS}.{i}" for i in range(blocks)), *(f"{LAYERS}.{i}" for i in range(layers)))
    others = {"model.visual", "model.language_model", "model.language_model.embed_tokens", "lm_head"}
    assert found.plans.recompute == repeated and set(found.plans.fsdp) == {*repeated, *others}
    assert found.plans.ep == () and found.sizes.shard == 8 and found.source.expert_layout is None
    text = "\n".join(found.lines)
    assert "layout: 8 processes = replicate 1 · shard 8 (auto: all 8 ranks)" in text and "; experts" not in text
    assert f"model: {family} of ./ckpt/mm_path/{name}" in found.lines and "\nexperts:" not in text
    for dead in ("parallel.ep_plan.apply_modules=[model.language_model.layers.{*}.mlp.experts]",
                 "features.recompute_plan.apply_modules=[visual.blocks.{*}]"):  # fmt: skip
        with pytest.raises(UserError, match=dead.split("=")[0]):
            plan(load_config(EXAMPLES / file, [dead]), 8, "npu")


@pytest.mark.parametrize("family", FILES)
def test_the_file_differs_where_the_model_does(family):
    published, own = (load_config(path).model_dump() for path in (SEED, EXAMPLES / FILES[family][0]))
    for content in (published, own):
        content["data"]["dataset_param"]["preprocess_parameters"].pop("model_name_or_path")
        content["data"]["dataset_param"]["basic_parameters"].pop("template")
        content["data"]["dataloader_param"].pop("collate_param")
        content["training"] = {k: v for k, v in content["training"].items() if k not in ("load", "plugin")}
        content.pop("model")
        for key in ("expert_parallel_size", "ep_plan"):
            content["parallel"].pop(key)
    assert own == published
