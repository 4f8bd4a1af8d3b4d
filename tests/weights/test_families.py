"""Round trips of the dense families through every kind of layout and both kinds of checkpoint; the wide matrix is slow."""

from __future__ import annotations

import itertools

import pytest
import torch

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import dcp_verbs, experts, verbs
from mm_models.weights.check import compare
from mm_models.weights.dcp.folder import open_dcp
from mm_models.weights.describe import describe
from mm_models.weights.manifest import open_checkpoint
from tests.composed import MIXES, composed_folder
from tests.weights.folders import (
    QUIET,
    assert_same_folder,
    from_dcp,
    hf_folder,
    loaded,
    resplit,
    state_of,
    to_dcp,
    to_hf,
    to_mm,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "glm4v")
CHAIN = (
    {"tp": 2, "pp": 2, "vpp": 2, "vision": [[1, 1], [0, 0]], "text": [[0, 1], [2, 1]]},
    {"pp": 4, "vision": [1, 1, 0, 0], "text": [0, 1, 1, 2]},
    {"tp": 2},
    {"pp": 2, "vision": [2, 0], "text": [4, 0]},
)
DEPTH = {"qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1]}}


@pytest.fixture(scope="module", params=FAMILIES)
def hf(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / request.param
    return hf_folder(path, family=request.param, shard_size="200KB", **DEPTH.get(request.param, {}))


def test_chains_end_where_they_began(hf, tmp_path):
    """hf -> mm -> resplit -> ... -> dcp -> mm -> hf: the bytes of the first folder; every link compared with it."""
    at = to_mm(hf, tmp_path / "0", **CHAIN[0])
    for number, layout in enumerate(CHAIN[1:], 1):
        at = resplit(at, tmp_path / str(number), **layout)
        assert compare(at, hf).equal, layout
    dcp_verbs.mm_to_dcp(open_checkpoint(at), tmp_path / "dcp", hf=hf, options=QUIET)
    assert compare(tmp_path / "dcp", at).equal
    assert_same_folder(from_dcp(tmp_path / "dcp", hf, tmp_path / "from dcp"), hf)
    target = verbs.Target(layout=ParallelLayout(tp=2, pp=2), vision_layers=[1, 1], text_layers=[0, 4])
    dcp_verbs.dcp_to_mm(tmp_path / "dcp", tmp_path / "last", target, options=QUIET)
    assert_same_folder(to_hf(tmp_path / "last", hf, tmp_path / "back"), hf)


@pytest.mark.parametrize("mix", [MIXES[0], pytest.param(MIXES[1], marks=pytest.mark.slow)])
def test_a_model_that_no_family_joins_goes_the_same_ways(tmp_path, mix):
    """This tower, that decoder: hf -> mm -> resplit -> resplit -> hf, and hf -> dcp -> hf."""
    hf = composed_folder(tmp_path / "hf", mix)
    mm, dcp = to_mm(hf, tmp_path / "mm", tp=2, pp=2, vpp=2), to_dcp(hf, tmp_path / "dcp")
    last = resplit(resplit(mm, tmp_path / "four", pp=4), tmp_path / "two", tp=2)
    assert compare(last, hf).equal and compare(dcp, mm).equal
    assert_same_folder(to_hf(last, hf, tmp_path / "back"), hf)
    assert_same_folder(from_dcp(dcp, hf, tmp_path / "from dcp"), hf)


def test_every_rank_holds_whole_heads_and_whole_biases(hf, tmp_path):
    """What TP cuts and what it repeats, from the files themselves: rows of column-parallel weights and their biases are cut,
    a bias behind a row-parallel weight is on every rank."""
    ranks = [tensors for _, tensors in sorted(loaded(to_mm(hf, tmp_path / "mm", tp=2)).items())]
    (whole,) = loaded(to_mm(hf, tmp_path / "one")).values()
    for name, tensor in whole.items():
        parts = [rank[name] for rank in ranks]
        column = any(mark in name for mark in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer"))
        row = name.endswith(".weight") and any(
            mark in name for mark in ("linear_proj", "linear_fc2", "self_attention.proj")
        )
        if name.startswith("image_encoder.projector") and ".encoder." not in name:
            column = row = False
        if name.endswith("self_attention.qkv.weight"):
            thirds = [part.chunk(3) for part in parts]
            assert torch.equal(torch.cat([third[at] for at in range(3) for third in thirds]), tensor), name
        elif column and "linear_fc1" in name and gated(hf, name):
            halves = [part.chunk(2) for part in parts]
            assert torch.equal(torch.cat([h[0] for h in halves] + [h[1] for h in halves]), tensor), name
        elif column or row:
            assert torch.equal(torch.cat(parts, dim=1 if row else 0), tensor), name
        else:
            assert all(torch.equal(part, tensor) for part in parts), name


def gated(hf, name: str) -> bool:
    """Whether an fc1 is [gate; up]."""
    return not name.startswith("image_encoder.projector") and (name.startswith("text") or "qwen2_vl" not in hf.name)


def test_no_expert_layout_is_asked_for_or_taken(hf, tmp_path, monkeypatch):
    """A model without experts: the variable means nothing, a folder without manifest needs no declaration, a layout is refused."""
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    dcp = to_dcp(hf, tmp_path / "dcp")
    assert "  expert layout: no experts, dcp_prefix: ''" in describe(dcp)
    (dcp / "release/manifest.json").unlink()
    assert "  no manifest (a folder of the field): no experts" in describe(dcp)
    assert_same_folder(from_dcp(dcp, hf, tmp_path / "back"), hf)
    assert open_dcp(dcp).manifest is None
    for refused in (
        lambda: to_dcp(hf, tmp_path / "no", expert_layout="stacked"),
        lambda: from_dcp(dcp, hf, tmp_path / "no", expert_layout="stacked_hf"),
    ):
        with pytest.raises(UserError, match=r"was given, but the model has no experts\. Leave it out"):
            refused()
    with pytest.raises(UserError, match="has no experts to merge or split"):
        experts.moe_expert(hf, tmp_path / "no", expert_layout="stacked", options=QUIET)
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_after_every_other(tmp_path, family):
    """TP 1, 2, 4 by PP 1, 2, 4 by VPP 1, 2: there and back, and one resplit after the other."""
    more = {"depth": 8} | ({"fullatt_block_indexes": [3, 7]} if family == "qwen2_5_vl" else {})
    hf = hf_folder(tmp_path / family, family=family, num_hidden_layers=8, num_key_value_heads=4, **more)
    at = None
    for tp, pp, vpp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
        if vpp > pp:
            continue
        layout, name = {"tp": tp, "pp": pp, "vpp": vpp}, f"{tp}-{pp}-{vpp}"
        mm = to_mm(hf, tmp_path / f"mm {name}", **layout)
        at = resplit(at or mm, tmp_path / f"at {name}", **layout)
        assert compare(at, mm).equal, layout
        assert [f.read_bytes() for f in sorted(at.rglob("*.pt"))] == [f.read_bytes() for f in sorted(mm.rglob("*.pt"))]
        assert_same_folder(to_hf(at, hf, tmp_path / f"hf {name}"), hf)
    assert len(state_of(hf)) > 100
