"""The fitness checks fail, by name, on what a family can get wrong: one thing broken at a time, in the place of the right one."""

from __future__ import annotations

import re

import pytest
import torch

from mm_models.registry import table
from tests.fitness import broken
from tests.fitness.folders import changed, fsdp2_faults, plan_faults, position_faults, round_trip, shipped
from tests.fitness.megatron import assembly_case, forward_case
from tests.fitness.registered import families, model_of, register, table_faults, tiny_name
from tests.harness import run
from tests.weights.folders import hf_folder

HERE = "tests.fitness.broken"


def weights(name: str) -> dict:
    """The decoder's weight map broken so."""
    return {"weight_maps": {broken.DECODER: f"{HERE}:{name}"}}


@pytest.fixture
def enter(monkeypatch):
    """`register`, undone after the test."""

    def entered(entries: dict) -> dict:
        for name in entries:
            monkeypatch.setattr(table(name), "_targets", dict(table(name)._targets))
        register(entries)
        return entries

    return entered


@pytest.fixture
def family():
    return next(one for one in families().values() if one.ids["text_decoder"][0] == broken.DECODER)


@pytest.fixture
def model(family):
    return model_of(family, " ".join(ids[0] for ids in family.ids.values()))


ASSEMBLY = {
    "dropped": r"decoder\.layers\.\d\.pre_mlp_layernorm\.weight is \(64,\) in the model, None in the map",
    "misnamed": r"post_attention_layernorm\.weight is None in the model, \(64,\) in the map",
    "wrong_shard": r"linear_proj\.weight is \(64, 32\) in the model, \(32, 64\) in the map",
    "not_split": r"word_embeddings\.weight is \(160, 64\) in the model, \(320, 64\) in the map",
    "wrong_place": r"final_layernorm\.weight is \(64,\) in the model, None in the map",
}


@pytest.mark.parametrize(
    "name", ["misnamed", *(pytest.param(n, marks=pytest.mark.slow) for n in ASSEMBLY if n != "misnamed")]
)
def test_assembly(name, model):
    (found,) = run(assembly_case, 1, model.model_dump_json(), False, weights(name), timeout=120)
    assert any(re.search(ASSEMBLY[name], fault) for fault in found["faults"]), found["faults"][:3]


def test_forward(family, model, tmp_path):
    """Gate and up cut as one have the right shape at TP2 and are the wrong rows."""
    folder = hf_folder(tmp_path / "hf", dtype=torch.float32, family=tiny_name(family))
    errors = run(
        forward_case, 2, tiny_name(family), model.model_dump_json(), str(folder), weights("halves"), timeout=60
    )
    assert max(errors) > 1e-2, errors


@pytest.mark.parametrize("name", ["dropped", "misnamed_there", "twice_there"])
def test_round_trip_and_fsdp2_names(name, family, model, enter, tmp_path):
    enter(weights(name))
    with pytest.raises(Exception, match=r"post_attention_layernorm\.weight"):
        round_trip(family, model, tmp_path)
    faults = list(fsdp2_faults(family, model))
    assert any("post_attention_layernorm.weight is (64,) in the model, None in the map" in fault for fault in faults)


def test_positions(family, enter):
    enter({"positions": {broken.DECODER: f"{HERE}:shifted"}})
    sides = [
        f"{broken.DECODER}: positions differ from Hugging Face's, padding on the {side}" for side in ("left", "right")
    ]
    assert list(position_faults(family, broken.DECODER)) == sides


def test_fsdp2_class(family, model, enter):
    enter({"models": {family.model_id: f"{HERE}:assembly"}})
    with pytest.raises(RuntimeError, match=r"has no module of class .* to replace"):
        list(fsdp2_faults(family, model))


PLANS = {
    "a wrong name": (".layers.{*}", ".layer.{*}", "layer"),
    "a module left out": ("      - lm_head\n", "", "lm_head.weight: in no module of fsdp_plan or ep_plan"),
}


@pytest.mark.parametrize("change", PLANS)
def test_plans(change, family, tmp_path):
    old, new, words = PLANS[change]
    faults = list(plan_faults(family, changed(shipped(family)[0], tmp_path / "c.yaml", old, new)))
    assert faults and any(words in fault for fault in faults), faults


def test_tables(enter):
    enter(
        {"converters": {"nameless": f"{HERE}:nameless"}, "text_decoders": {"orphan": f"{HERE}:nobody"}, "positions": {}}
    )
    table("positions")._targets.pop(broken.DECODER)
    faults = table_faults()
    for words in (
        "nameless: no tiny model; give tests/models.py FAMILIES an entry 'nameless'",
        "nameless: model_id nameless is not in table models",
        "orphan: in table text_decoders, not in sections",
        "orphan: in table text_decoders, of no converter",
        f"{broken.DECODER}: in table text_decoders, not in positions",
    ):
        assert words in faults, faults
