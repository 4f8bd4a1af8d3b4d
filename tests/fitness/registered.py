"""What is registered: families, the models their ids make, the topologies these claim; and what the tables owe each other.

Nothing here names a family. One is found by its converter, and its tiny Hugging Face model by its `model_type`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping

import pytest

from mm_models.config.family import SECTIONS, Family
from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.registry import table
from tests.models import FAMILIES, tiny_config

Entries = Mapping[str, Mapping[str, str]]
"""Table -> id -> target."""

OWES = {
    "vision_encoders": ("sections", "weight_maps", "vit_layer_specs"),
    "vision_projectors": ("sections", "weight_maps"),
    "text_decoders": ("sections", "weight_maps", "llm_layer_specs", "positions"),
}
"""A component's table -> the tables that must have its ids too."""
PART = {"vision_encoders": "vision_encoder", "vision_projectors": "vision_projector", "text_decoders": "text_decoder"}


def register(entries: Entries) -> None:
    """Enter these as a plugin would, also in the place of what is there: to break one thing of a family."""
    for name, targets in entries.items():
        table(name)._targets.update(targets)


def families() -> dict[str, Family]:
    """Every converter's family by the converter's name."""
    return {name: table("converters").get(name) for name in table("converters").ids()}


def tiny_name(family: Family) -> str:
    """The family's entry in `tests.models.FAMILIES`."""
    found = [name for name in family.model_types if name in FAMILIES]
    assert found, f"{family.name}: no tiny model; give tests/models.py FAMILIES an entry {family.model_types[0]!r}"
    return found[0]


def variants() -> list[tuple[str, str]]:
    """(converter, ids): the usual ids of every family, then each other id in the place of the usual one."""
    found = []
    for name, family in families().items():
        first = [ids[0] for ids in family.ids.values()]
        found.append((name, " ".join(first)))
        for at, ids in enumerate(family.ids.values()):
            found += [(name, " ".join([*first[:at], id, *first[at + 1 :]])) for id in ids[1:]]
    return found


def usual(*more: object) -> list:
    """Parameters of a test: every family with its usual ids; `more` follow."""
    return [pytest.param(name, ids, *more, id=name) for name, ids in _firsts().items()]


def others(*more: object) -> list:
    """The same with every other id, of the long tail: two ids of one thing."""
    return [pytest.param(*one, *more, marks=pytest.mark.slow) for one in variants() if one[1] != _firsts()[one[0]]]


def every(*more: object) -> list:
    """Both, of the long tail."""
    return [pytest.param(*one, *more, marks=pytest.mark.slow) for one in variants()]


def _firsts() -> dict[str, str]:
    return {name: " ".join(ids[0] for ids in family.ids.values()) for name, family in families().items()}


def model_of(family: Family, ids: str, **sections: Mapping[str, object]) -> ModelConfig:
    """The tiny model of a family with these ids; `sections` update one each."""
    content = family.model_json(tiny_config(tiny_name(family)).to_dict())
    for section, id in zip(family.ids, ids.split()):
        place = content if SECTIONS[section] is None else content[SECTIONS[section]]
        place[section] |= {"model_id": id, **sections.get(section, {})}
    return ModelConfig.model_validate(json.loads(json.dumps(content)))


def with_kv_heads(family: Family, ids: str) -> ModelConfig:
    """The same with as many key-value heads as heads, so that every degree of TP divides them."""
    heads = model_of(family, ids).text.num_attention_heads
    return model_of(family, ids, text_decoder={"num_query_groups": heads})


def layouts(model: ModelConfig, *, wide: bool) -> Iterator[ParallelLayout]:
    """TP 1, 2, 4, PP 1, 2, 4, VPP 2, and with experts EP 2 and experts that TP does not cut: all that `check_layout` lets pass.

    Each degree with each other where `wide`, else each degree once.
    """
    pipelines = ((1, 1), (2, 1), (4, 1), (2, 2))
    grids = itertools.product((1, 2, 4), pipelines) if wide else zip((1, 2, 4, 2), pipelines)
    experts = model.text is not None and model.text.num_moe_experts
    for tp, (pp, vpp) in grids:
        for ep, etp in ((1, tp), (2, tp), (2, 1)) if experts else ((1, tp),):
            dp = max(1, ep * etp // tp)
            layout = ParallelLayout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp, sequence_parallel=tp > 1)
            try:
                model.check_layout(layout)
            except UserError:
                continue
            yield layout


def splits(model: ModelConfig, layout: ParallelLayout) -> Iterator[dict[str, object]]:
    """Layer lists: the default, and the tower over every stage with the decoder on the last."""
    yield {}
    flat = layout.pp * layout.vpp
    if flat > 1 and model.vision and model.text:
        counts = [
            model.vision.num_layers * (at + 1) // flat - model.vision.num_layers * at // flat for at in range(flat)
        ]
        yield {
            "vision_layers": _rows(counts, layout),
            "text_layers": _rows([0] * (flat - 1) + [model.text.num_layers], layout),
        }


def _rows(counts: list[int], layout: ParallelLayout) -> list[list[int]]:
    return [counts[chunk * layout.pp : (chunk + 1) * layout.pp] for chunk in range(layout.vpp)]


def table_faults() -> list[str]:
    """What the tables owe each other and do not have, by name."""
    faults = []
    known = {
        section: {id for family in families().values() for id in family.ids.get(section, ())} for section in SECTIONS
    }
    for component, owed in OWES.items():
        ids = set(table(component).ids())
        for name in owed:
            faults += [f"{id}: in table {component}, not in {name}" for id in sorted(ids - set(table(name).ids()))]
        section = PART[component]
        faults += [f"{id}: in table {component}, of no converter" for id in sorted(ids - known[section])]
        faults += [f"{id}: of a converter, not in table {component}" for id in sorted(known[section] - ids)]
    components = {id for component in OWES for id in table(component).ids()}
    for name in sorted({name for owed in OWES.values() for name in owed}):
        faults += [f"{id}: in table {name}, of no component" for id in table(name).ids() if id not in components]
    models = {family.model_id: name for name, family in families().items()}
    faults += [f"{id}: in table models, of no converter" for id in table("models").ids() if id not in models]
    faults += [
        f"{name}: model_id {id} is not in table models" for id, name in models.items() if id not in table("models")
    ]
    for family in families().values():
        try:
            tiny_name(family)
        except AssertionError as fault:
            faults.append(str(fault))
    return faults
