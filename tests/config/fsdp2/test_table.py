"""The table of features says what the schema and the file say."""

from __future__ import annotations

import pytest

from mm_models.config.fsdp2 import RunConfig, load_config
from mm_models.config.fsdp2.table import FEATURES, feature_table
from mm_models.config.strict import dotted_keys
from mm_models.errors import UserError
from tests.config.fsdp2.kit import SEED


def test_the_rows_are_the_schemas_and_the_files():
    """E22."""
    lines = feature_table(load_config(SEED)).splitlines()
    assert lines[:3] == [
        "| Feature | Key | Default | In this file |",
        "| --- | --- | --- | --- |",
        "| FSDP2 | `parallel.fully_shard_parallel_size` | `auto` | `auto` |",
    ]
    assert "| Expert parallel | `parallel.expert_parallel_size` | `1` | `16` |" in lines
    assert "| Fused MoE operators of the NPU | `parallel.ep_plan.use_npu_fused_ops` | `null` | `null` |" in lines
    assert "| Recompute | `features.recompute` | `false` | `true` |" in lines
    assert len(lines) == 2 + len(FEATURES)
    changed = feature_table(load_config(SEED, ["features.recompute=false"])).splitlines()
    assert [a for a, b in zip(lines, changed) if a != b] == ["| Recompute | `features.recompute` | `false` | `true` |"]


def test_both_languages_have_the_same_keys():
    tables = [feature_table(load_config(SEED), language).splitlines() for language in ("en", "zh")]
    cells = [[line.split("|")[2:] for line in table[2:]] for table in tables]
    assert cells[0] == cells[1] and "| 重计算 | `features.recompute` | `false` | `true` |" in tables[1]
    assert {key for _, _, key in FEATURES} < set(dotted_keys(RunConfig))
    with pytest.raises(UserError, match="language 'fr' is not known"):
        feature_table(load_config(SEED), "fr")
