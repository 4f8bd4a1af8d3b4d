"""Conversions of DCP checkpoints: byte-equal round trips over every expert layout, and what is refused on the way."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as stock

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import dcp_verbs, verbs
from mm_models.weights.check import compare
from mm_models.weights.dcp import chunks
from mm_models.weights.dcp.folder import open_dcp
from mm_models.weights.experts import moe_expert
from mm_models.weights.manifest import open_checkpoint
from mm_models.weights.rules import FILE_LAYOUTS
from tests.weights.dcp.kit import assert_equal, stacked_state
from tests.weights.folders import (
    QUIET,
    assert_same_folder,
    copy,
    edit_state,
    from_dcp,
    hf_folder,
    state_of,
    to_dcp,
    to_mm,
)

GATE_UP = "model.language_model.layers.{}.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("expert_layout", FILE_LAYOUTS)
@pytest.mark.parametrize("chunk", [chunks.CHUNK, 5000, pytest.param(300, marks=pytest.mark.slow)])
def test_every_layout_comes_back_byte_for_byte(hf, hf_stacked, tmp_path, monkeypatch, expert_layout, chunk):
    monkeypatch.setattr(chunks, "CHUNK", chunk)
    for number, source in enumerate((hf, hf_stacked)):
        dcp = to_dcp(source, tmp_path / f"dcp{number}", expert_layout=expert_layout)
        assert (dcp / "latest_checkpointed_iteration.txt").read_text() == "release"
        assert_same_folder(from_dcp(dcp, source, tmp_path / f"back{number}"), source)
        assert_same_folder(from_dcp(dcp / "release", source, tmp_path / f"again{number}"), source)
        for item in open_dcp(dcp).manifest.items:
            assert item.nbytes <= max(chunk, item.nbytes // max(1, item.sizes[0] if item.sizes else 1))
    one, two = (open_dcp(tmp_path / f"dcp{number}").manifest for number in (0, 1))
    assert one.items == two.items  # B30: the hub's two layouts give the same bytes


@pytest.mark.parametrize("expert_layout", ["stacked_hf", "stacked", "flat"])
def test_stock_torch_reads_the_layout_that_was_asked_for(hf, tmp_path, expert_layout):
    dcp = to_dcp(hf, tmp_path / "dcp", expert_layout=expert_layout)
    expected = stacked_state(state_of(hf), "stacked_hf" if expert_layout == "stacked_hf" else "stacked")
    if expert_layout == "flat":
        expected = {n: t.reshape(-1, t.shape[-1]) if ".experts." in n else t for n, t in expected.items()}
    state = {"model": {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}}
    stock.load(state, checkpoint_id=str(dcp / "release"), no_dist=True)
    assert_equal(state["model"], expected)


def test_gate_and_up_are_neither_swapped_nor_turned_wrong(hf, tmp_path):
    """B30, B05, B36: gate 1, up 2, expert e is e + 1; every expert once, and every sum exact."""
    path = copy(hf, tmp_path / "hf")

    def fill(state):
        for name, tensor in state.items():
            if ".experts." in name:
                number = int(name.split(".experts.")[1].split(".")[0])
                tensor.fill_((number + 1) * (100 if "up_proj" in name else 1))

    edit_state(path, fill)
    dcp = to_dcp(path, tmp_path / "dcp", expert_layout="stacked")
    wanted = {"model": {GATE_UP.format(2): torch.empty(8, 64, 96)}}
    stock.load(wanted, checkpoint_id=str(dcp / "release"), no_dist=True)
    stacked = wanted["model"][GATE_UP.format(2)]
    for expert in range(8):
        assert (stacked[expert, :, :48] == expert + 1).all() and (stacked[expert, :, 48:] == 100 * (expert + 1)).all()
    assert_same_folder(from_dcp(dcp, path, tmp_path / "back"), path)


def test_megatron_and_dcp_convert_into_each_other(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", tp=2, pp=2, ep=4, etp=2)
    for expert_layout in FILE_LAYOUTS:
        dcp, back = tmp_path / f"dcp-{expert_layout}", tmp_path / f"mm-{expert_layout}"
        dcp_verbs.mm_to_dcp(open_checkpoint(mm), dcp, hf=hf, expert_layout=expert_layout, options=QUIET)
        assert (dcp / "config.json").is_file()
        assert compare(dcp, hf).equal and compare(mm, dcp).equal and compare(dcp, mm).equal
        target = verbs.Target(layout=ParallelLayout(tp=1, pp=1, ep=2, etp=2))
        dcp_verbs.dcp_to_mm(dcp, back, target, options=QUIET)
        assert compare(back, mm).equal
        assert [i.crc32 for i in open_dcp(dcp).manifest.items] == [
            i.crc32
            for i in open_dcp(to_dcp(hf, tmp_path / f"hf-{expert_layout}", expert_layout=expert_layout)).manifest.items
        ]


def test_a_tied_head_and_an_mtp_layer(tmp_path):
    tied = hf_folder(tmp_path / "tied", tie_word_embeddings=True)
    dcp = to_dcp(tied, tmp_path / "dcp")
    assert not any("lm_head" in key for key in open_dcp(dcp).metadata.tensors)
    assert_same_folder(from_dcp(dcp, tied, tmp_path / "back"), tied)
    mtp = hf_folder(tmp_path / "mtp")
    edit_state(mtp, lambda state: state.update({"model.language_model.layers.4.eh_proj.weight": torch.randn(4, 8)}))
    told = []
    dcp_verbs.hf_to_dcp(mtp, tmp_path / "dcp2", expert_layout="stacked", options=verbs.Options(say=told.append))
    assert told == ["ignored, 1 known extras: model.language_model.layers.4.eh_proj.weight"]
    assert_same_folder(from_dcp(tmp_path / "dcp2", mtp, tmp_path / "back2"), mtp)


def test_prefixes_stand_before_the_names_and_are_told_apart(hf, tmp_path):
    dcp = to_dcp(hf, tmp_path / "dcp", dcp_prefix="model.")
    assert "model.model.model.language_model.norm.weight" in open_dcp(dcp).metadata.tensors
    assert_same_folder(from_dcp(dcp, hf, tmp_path / "back"), hf)
    with pytest.raises(UserError, match=r"manifest says dcp_prefix 'model\.', but '' was given"):
        from_dcp(dcp, hf, tmp_path / "no", dcp_prefix="")
    (dcp / "release/manifest.json").unlink()
    words = (
        r"its keys begin with 'model\.model\.' .*expected 'model\.'.*mm-convert dcp_to_hf .*--dcp_prefix \"model\.\""
    )
    with pytest.raises(UserError, match=words):
        from_dcp(dcp, hf, tmp_path / "no", expert_layout="stacked_hf")
    assert_same_folder(from_dcp(dcp, hf, tmp_path / "yes", expert_layout="stacked_hf", dcp_prefix="model."), hf)


def test_a_hugging_face_prefix_is_taken_off_and_put_back(hf, tmp_path):
    named = copy(hf, tmp_path / "named")

    def rename(state):
        for name in list(state):
            state["policy." + name] = state.pop(name)

    edit_state(named, rename)
    dcp = to_dcp(named, tmp_path / "dcp", hf_prefix="policy.")
    assert open_dcp(dcp).manifest.items == open_dcp(to_dcp(hf, tmp_path / "plain")).manifest.items
    assert_same_folder(from_dcp(dcp, named, tmp_path / "back", hf_prefix="policy."), named)
    with pytest.raises(UserError, match=r"no tensor's name begins with the prefix 'polcy\.'"):
        to_dcp(named, tmp_path / "no", hf_prefix="polcy.")
    with pytest.raises(UserError, match="unexpected"):
        to_dcp(named, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_one_vision_tensor_less_is_named_and_nothing_is_written(hf, tmp_path):
    """B01."""
    path = copy(hf, tmp_path / "hf")
    edit_state(path, lambda state: state.pop("model.visual.blocks.1.attn.proj.weight"))
    with pytest.raises(UserError, match=r"1 missing: model.visual.blocks.1.attn.proj.weight"):
        to_dcp(path, tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_the_declared_layout_is_checked_and_both_are_named(hf, tmp_path, monkeypatch):
    other = to_dcp(hf, tmp_path / "other", expert_layout="stacked_hf")
    dcp = to_dcp(hf, tmp_path / "dcp", expert_layout="stacked")
    with pytest.raises(UserError, match="its manifest says expert layout stacked, but flat was asked for"):
        from_dcp(dcp, hf, tmp_path / "no", expert_layout="flat")
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    assert_same_folder(from_dcp(dcp, hf, tmp_path / "back"), hf)
    with pytest.raises(
        UserError, match=r"says expert layout stacked_hf, but GLM4V_DCP_3D=1 says stacked. Unset GLM4V_DCP_3D"
    ):
        from_dcp(other, hf, tmp_path / "no")
    (dcp / "release/manifest.json").unlink()
    assert_same_folder(from_dcp(dcp, hf, tmp_path / "by-variable"), hf)
    monkeypatch.delenv("GLM4V_DCP_3D")
    words = (
        r"down_proj is \(8, 48, 64\), which is expert layout stacked; flat was expected "
        r"\(GLM4V_DCP_3D; the folder has no manifest\), which is \(384, 64\).*Declare stacked .*mm-convert dcp_to_hf"
    )
    with pytest.raises(UserError, match=words):
        from_dcp(dcp, hf, tmp_path / "no")
    with pytest.raises(UserError, match="which is expert layout stacked; per_expert was expected"):
        from_dcp(dcp, hf, tmp_path / "no", expert_layout="per_expert")
    monkeypatch.setenv("GLM4V_DCP_3D", "true")
    with pytest.raises(UserError, match="GLM4V_DCP_3D is 'true'; it takes 1"):
        from_dcp(dcp, hf, tmp_path / "no")


def test_a_flipped_bit_is_found(hf, tmp_path):
    for expert_layout in ("stacked_hf", "stacked", "flat"):
        dcp = to_dcp(hf, tmp_path / f"dcp-{expert_layout}", expert_layout=expert_layout)
        item = next(i for i in open_dcp(dcp).manifest.items if i.key == "model." + GATE_UP.format(3))
        with (dcp / "release" / item.file).open("r+b") as file:
            file.seek(item.offset + 77)
            byte = file.read(1)[0]
            file.seek(item.offset + 77)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(UserError, match=r"gate_up_proj: CRC-32 is .* the manifest says"):
            from_dcp(dcp, hf, tmp_path / f"back-{expert_layout}")
        assert not (tmp_path / f"back-{expert_layout}").exists()
        assert "CRC-32" in compare(dcp, hf).lines[0] and not compare(dcp, hf).equal


# --- moe_expert ---------------------------------------------------------------------------------------------------


def merged(hf, out, expert_layout):
    moe_expert(hf, out, expert_layout=expert_layout, options=QUIET)
    return out


@pytest.mark.parametrize("expert_layout", FILE_LAYOUTS)
def test_merged_experts_split_into_the_same_tensors(hf, tmp_path, expert_layout):
    path = merged(hf, tmp_path / "merged", expert_layout)
    state, expected = (
        state_of(path),
        stacked_state(state_of(hf), "stacked" if expert_layout in ("stacked", "flat") else "stacked_hf"),
    )
    if expert_layout != "per_expert":
        assert set(state) == set(expected)
        assert all(torch.equal(state[n].float(), t.reshape(state[n].shape)) for n, t in expected.items())
    assert_equal(state_of(merged(path, tmp_path / "split", "per_expert")), state_of(hf))


def test_a_folder_merged_in_another_orientation_is_refused_also_when_shapes_agree(tmp_path):
    """Hidden size 96 = 2 x 48: gate_up is (8, 96, 96) either way."""
    square = hf_folder(tmp_path / "hf", hidden_size=96, out_hidden_size=96, head_dim=32)
    stacked = merged(square, tmp_path / "stacked", "stacked")
    assert (
        state_of(stacked)[GATE_UP.format(1)].shape
        == state_of(merged(square, tmp_path / "own", "stacked_hf"))[GATE_UP.format(1)].shape
    )
    words = r"its experts are merged as stacked, expected Hugging Face's own layouts.*moe_expert --style split"
    with pytest.raises(UserError, match=words):
        to_dcp(stacked, tmp_path / "no")
    (stacked / "mm_experts.json").unlink()  # the files themselves still say it
    with pytest.raises(UserError, match=words):
        to_mm(stacked, tmp_path / "no")
    to_mm(tmp_path / "own", tmp_path / "mm")
    assert compare(tmp_path / "mm", square).equal


def test_dcp_folders_of_two_layouts_are_told_apart_when_shapes_agree(tmp_path):
    square = hf_folder(tmp_path / "hf", hidden_size=96, out_hidden_size=96, head_dim=32)
    one = to_dcp(square, tmp_path / "one", expert_layout="stacked")
    two = to_dcp(square, tmp_path / "two", expert_layout="stacked_hf")
    assert compare(one, two).equal and compare(two, square).equal
    assert_same_folder(from_dcp(one, square, tmp_path / "back"), square)


def test_merge_stacked_shapes_and_round_trip(tmp_path):
    """The seeds' test: two experts, gate and up (2, 3), down (3, 2)."""
    from mm_models.weights import hffolder
    from mm_models.weights.model_map import build
    from tests.models import tiny_glm_config
    from tests.weights.folders import model_config

    config = tiny_glm_config(
        hidden_size=3, n_routed_experts=2, moe_intermediate_size=2, num_hidden_layers=2, out_hidden_size=3
    )
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    expected = build(model_config(path)).hf("per_expert")
    from safetensors.torch import save_file

    state = {name: torch.randn(tensor.shape) for name, tensor in expected.items()}
    save_file(state, path / hffolder.SINGLE, {"format": "pt"})
    assert state["model.language_model.layers.1.mlp.experts.1.gate_proj.weight"].shape == (2, 3)
    together = state_of(merged(path, tmp_path / "merged", "stacked"))
    assert together[GATE_UP.format(1)].shape == (2, 3, 4)
    assert together["model.language_model.layers.1.mlp.experts.down_proj"].shape == (2, 2, 3)
    assert_equal(state_of(merged(tmp_path / "merged", tmp_path / "split", "per_expert")), state)
