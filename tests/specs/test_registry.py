"""The registry's golden listing, its refusals, and what listing it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mm_models import registry
from mm_models.errors import UserError
from mm_models.registry import TABLES, Registry, load_plugins, table

ENCODERS = ["glm4v_vit", "qwen2_5_vit", "qwen2vit"]
PROJECTORS = ["GlmMLP", "lnmlp"]
DECODERS = ["glm4v_lm", "glm4v_moe_lm", "qwen2_5_lm", "qwen2lm"]
PARTS = sorted([*ENCODERS, *PROJECTORS, *DECODERS])

GOLDEN = {
    "vision_encoders": ENCODERS,
    "vision_projectors": PROJECTORS,
    "text_decoders": DECODERS,
    "vit_layer_specs": ENCODERS,
    "llm_layer_specs": DECODERS,
    "sections": PARTS,
    "weight_maps": PARTS,
    "converters": ["Glm4vMoeConverter", "GlmConverter", "Qwen2VLConverter", "Qwen2_5_VLConverter"],
    "positions": DECODERS,
    "models": ["glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl"],
    "datasets": ["huggingface"],
    "templates": ["glm4.1v", "glm4v", "glm4v_moe", "qwen2_vl", "qwen2vl"],
    "collators": ["glm4.1v", "glm4v", "glm4v_moe", "qwen2_vl", "qwen2vl", "qwen3vl"],
    "ops": [
        "causal_attention/torch",
        "gelu/torch",
        "grouped_matmul/torch",
        "layer_norm/torch",
        "quick_gelu/torch",
        "rms_norm/torch",
        "rotary/torch",
        "rotary_fp32/torch",
        "rotary_interleaved/torch",
        "segment_attention/torch",
        "silu_mul/torch",
        "swiglu/torch",
    ],
}


def test_golden_listing():
    """An id never disappears unseen."""
    found = {name: table(name).ids() for name in TABLES}
    assert {name: ids for name, ids in found.items() if ids} == GOLDEN


def test_every_target_can_be_imported():
    for name in TABLES:
        for id in table(name).ids():
            assert table(name).get(id) is not None


def test_listing_imports_nothing_heavy():
    code = (
        "import sys; from mm_models.registry import TABLES, table; [table(t).ids() for t in TABLES]; "
        "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_unknown_id_names_table_nearest_and_known():
    with pytest.raises(
        UserError, match=r"unknown id 'glm4v_moe_ml' in table 'llm_layer_specs'; did you mean 'glm4v_moe_lm'\?"
    ):
        table("llm_layer_specs").get("glm4v_moe_ml")
    with pytest.raises(UserError, match=r"unknown registry table 'text_decoder'; did you mean 'text_decoders'\?"):
        table("text_decoder")


def test_duplicate_names_both_definitions():
    registry = Registry("templates")
    registry.add("a", "one:x")
    registry.add("a", "one:x")
    with pytest.raises(UserError, match="'a' is defined twice in table 'templates': one:x and two:x"):
        registry.add("a", "two:x")


def test_plugins(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_loaded", {})  # or workers of later tests would load it too
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(
        "from mm_models.registry import table\nanswer = 42\ntable('templates').add('mine', 'my_plugin:answer')\n"
    )
    try:
        load_plugins([str(plugin)])
        assert table("templates").get("mine") == 42
    finally:
        table("templates")._targets.pop("mine")
        sys.modules.pop("my_plugin")
    with pytest.raises(UserError, match="no such file"):
        load_plugins([str(tmp_path / "other.py")])
    plugin.write_text("import no_such_module\n")
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError") as caught:
        load_plugins([str(plugin)])
    assert caught.value.__cause__.__traceback__ is not None
    with pytest.raises(UserError, match="plugin 'no_such_module' cannot be imported"):
        load_plugins(["no_such_module"])
