"""Every registered model on the Megatron target: assembled on every topology it claims, its weight map complete, its forward right."""

from __future__ import annotations

import pytest
import torch

from tests.fitness.megatron import assembly_case, forward_case
from tests.fitness.registered import every, families, model_of, others, table_faults, tiny_name, usual, with_kv_heads
from tests.harness import run
from tests.weights.folders import hf_folder


def test_the_tables_owe_each_other_nothing():
    assert table_faults() == []


@pytest.mark.parametrize("converter,ids,wide", [*usual(False), *every(True)])
def test_assembles_on_every_topology_and_the_map_covers_it(converter, ids, wide):
    """On the meta device; names and shapes on every rank are the weight map's, each element of each tensor on one rank and its copies."""
    model = with_kv_heads(families()[converter], ids)
    (found,) = run(assembly_case, 1, model.model_dump_json(), wide, {}, timeout=120)
    assert found["faults"] == []
    experts = [1, 2] if model.text.num_moe_experts else [1]
    assert found["degrees"] == {"tp": [1, 2, 4], "pp": [1, 2, 4], "vpp": [1, 2], "ep": experts}


@pytest.mark.parametrize("converter,ids", [*usual(), *others()])
def test_loaded_at_tp2_it_computes_what_hugging_face_does(converter, ids, tmp_path):
    """Shards of equal shapes can still be the wrong ones: [gate; up] cut in two, heads of another group."""
    family = families()[converter]
    folder = hf_folder(tmp_path / "hf", dtype=torch.float32, family=tiny_name(family))
    content = model_of(family, ids).model_dump_json()
    errors = run(forward_case, 2, tiny_name(family), content, str(folder), {}, timeout=60)
    assert max(errors) <= 1e-5, errors
