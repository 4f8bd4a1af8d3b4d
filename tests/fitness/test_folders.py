"""Every registered family: its Hugging Face folder there and back, its FSDP2 assembly and shipped plans, its positions."""

from __future__ import annotations

import pytest

from tests.fitness.folders import fsdp2_faults, plan_faults, position_faults, round_trip, shipped
from tests.fitness.registered import families, model_of, others, usual


@pytest.mark.parametrize("converter,ids", [*usual(), *others()])
def test_a_folder_comes_back_byte_for_byte(converter, ids, tmp_path):
    family = families()[converter]
    round_trip(family, model_of(family, ids), tmp_path)


@pytest.mark.parametrize("converter,ids", usual())
def test_the_fsdp2_assembly_has_the_names_of_the_weight_map(converter, ids):
    family = families()[converter]
    assert list(fsdp2_faults(family, model_of(family, ids))) == []


@pytest.mark.parametrize("converter,ids", usual())
def test_shipped_plans_match_and_leave_nothing_out(converter, ids):
    family = families()[converter]
    files = shipped(family)
    assert files, f"{converter}: no YAML under examples/ has model.model_id {family.model_id}"
    assert {path.name: list(plan_faults(family, path)) for path in files} == {path.name: [] for path in files}


@pytest.mark.parametrize("converter,ids", [*usual(), *others()])
def test_positions_are_hugging_faces(converter, ids):
    assert list(position_faults(families()[converter], ids.split()[-1])) == []
