"""Conversions keep every byte: Hugging Face to any layout and back, and through chains of layouts."""

from __future__ import annotations

import json

import pytest
import torch

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import verbs
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint, verify
from tests.weights.folders import (
    QUIET,
    assert_same_folder,
    copy,
    edit_config,
    edit_state,
    hf_folder,
    loaded,
    model_config,
    resplit,
    state_of,
    to_hf,
    to_mm,
)  # fmt: skip

LAYOUTS = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"pp": 4, "text": [0, 1, 2, 1], "vision": [2, 0, 0, 0]},
    {"pp": 2, "text": [4, 0], "vision": [2, 0]},
    {"pp": 2, "text": [0, 4], "vision": [0, 2]},
    {"pp": 2, "text": [0, 4], "vision": [1, 1]},
    {"tp": 2, "pp": 2, "vpp": 2, "text": [[0, 1], [1, 2]], "vision": [[1, 1], [0, 0]]},
    {"ep": 2},
    {"ep": 8},
    {"tp": 2, "ep": 4},
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 2, "etp": 1},
    {"ep": 2, "etp": 2},
    {"tp": 2, "etp": 4, "ep": 2},
    {"tp": 1, "pp": 2, "vpp": 2, "ep": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("folder", ["hf", "hf_stacked", "hf_fp32"])
def test_there_and_back_is_byte_equal(request, tmp_path, folder, layout):
    """Every file of the folder comes back as it was: weights, index, configs."""
    hf = request.getfixturevalue(folder)
    mm = to_mm(hf, tmp_path / "mm", **layout)
    assert not verify(open_checkpoint(mm))
    assert_same_folder(to_hf(mm, hf, tmp_path / "back"), hf)
    assert compare(hf, mm).equal


def test_resplit_chains_end_where_they_began(hf, tmp_path):
    """ep1 -> ep2·etp2 -> ep4 -> ep1 and tp2·pp2·ep2 -> tp1·pp4 -> tp1·pp1 -> Hugging Face."""
    for name, chain in {
        "a": [{}, {"ep": 2, "etp": 2}, {"ep": 4}, {}],
        "b": [{"tp": 2, "pp": 2, "ep": 2}, {"pp": 4}, {}],
        "c": [{"tp": 2}, {"tp": 1, "pp": 2, "vpp": 2}, {"pp": 4}, {"tp": 2, "etp": 4}, {}],
    }.items():
        mm = to_mm(hf, tmp_path / f"{name}0", **chain[0])
        for step, layout in enumerate(chain[1:], 1):
            mm = resplit(mm, tmp_path / f"{name}{step}", **layout)
            assert not verify(open_checkpoint(mm))
        direct = to_mm(hf, tmp_path / f"{name}_direct")
        for got, expected in zip(loaded(mm).values(), loaded(direct).values(), strict=True):
            assert set(got) == set(expected) and all(torch.equal(got[key], expected[key]) for key in got)
        assert_same_folder(to_hf(mm, hf, tmp_path / f"{name}_back"), hf)


def test_resplit_keeps_the_layer_lists_when_pp_stays(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", pp=2, text=[1, 3], vision=[2, 0])
    two = resplit(mm, tmp_path / "two", pp=2, tp=2)
    assert open_checkpoint(two).manifest.split.text.nested() == [[1, 3]]


def test_both_expert_layouts_give_the_same_checkpoint(hf, hf_stacked, tmp_path):
    one, two = to_mm(hf, tmp_path / "one", tp=2, ep=2), to_mm(hf_stacked, tmp_path / "two", tp=2, ep=2)
    for file in (one / "release").glob("*/*.pt"):
        assert file.read_bytes() == (two / "release" / file.parent.name / file.name).read_bytes()


def test_a_checkpoint_exports_in_the_layout_of_either_reference(hf, hf_stacked, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", ep=2)
    assert_same_folder(to_hf(mm, hf_stacked, tmp_path / "back"), hf_stacked)


def test_exports_load_in_transformers_with_equal_logits(hf, tmp_path):
    from transformers import Glm4vMoeForConditionalGeneration

    out = to_hf(to_mm(hf, tmp_path / "mm", tp=2, ep=2), hf, tmp_path / "back")
    ids = torch.arange(10, 30)[None]
    loads = [Glm4vMoeForConditionalGeneration.from_pretrained(path, output_loading_info=True) for path in (hf, out)]
    for _, info in loads:
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        one, two = (model.eval()(input_ids=ids).logits for model, _ in loads)
    assert torch.equal(one, two)


def test_a_second_conversion_is_the_same_bytes(hf, tmp_path):
    one, two = to_mm(hf, tmp_path / "one", tp=2, pp=2), to_mm(hf, tmp_path / "two", tp=2, pp=2)
    for file in sorted((one / "release").rglob("*")):
        if file.is_file():
            assert file.read_bytes() == (two / "release" / file.relative_to(one / "release")).read_bytes(), file


def test_tied_embeddings_are_stored_on_both_ends_and_exported_once(tmp_path):
    hf = hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    assert "lm_head.weight" not in state_of(hf)
    whole, split = to_mm(hf, tmp_path / "one"), to_mm(hf, tmp_path / "two", pp=2, tp=2)
    assert all("text_decoder.output_layer.weight" not in tensors for tensors in loaded(whole).values())
    files = loaded(split)
    for tp in range(2):
        first, last = files[f"mp_rank_0{tp}_000", 0], files[f"mp_rank_0{tp}_001", 0]
        assert torch.equal(
            first["text_decoder.embedding.word_embeddings.weight"], last["text_decoder.output_layer.weight"]
        )
    assert_same_folder(to_hf(split, hf, tmp_path / "back"), hf)
    assert_same_folder(to_hf(resplit(split, tmp_path / "again"), hf, tmp_path / "back2"), hf)


def test_copies_that_differ_are_refused(hf, tmp_path):
    """A replicated norm with other bytes on TP rank 1, with a manifest that agrees with it."""
    mm = to_mm(hf, tmp_path / "mm", tp=2)
    checkpoint = open_checkpoint(mm)
    entry = next(
        e for e in checkpoint.manifest.tensors if e.name.endswith("decoder.final_layernorm.weight") and "01" in e.file
    )
    manifest = json.loads((checkpoint.folder / "manifest.json").read_text())
    row = next(r for r in manifest["tensors"] if r["name"] == entry.name and r["file"] == entry.file)
    row["crc32"] ^= 1
    (checkpoint.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"final_layernorm.weight are copies of one tensor but differ"):
        resplit(mm, tmp_path / "two")


def test_known_extras_are_ignored_by_name_and_copied_through(hf, tmp_path):
    """The multi-token-prediction layer behind the last decoder layer, in any data type."""
    path = copy(hf, tmp_path / "hf")
    extras = {
        "model.language_model.layers.4.eh_proj.weight": torch.randn(64, 128),
        "model.language_model.layers.4.norm.weight": torch.randn(64).half(),
    }
    edit_state(path, lambda state: state.update(extras))
    said: list[str] = []
    options = verbs.Options(say=said.append)
    verbs.hf_to_mm(path, tmp_path / "mm", verbs.Target(layout=ParallelLayout(tp=2)), options=options)
    assert any("2 known extras" in line and all(name in line for name in extras) for line in said)
    checkpoint = open_checkpoint(tmp_path / "mm")
    verbs.mm_to_hf(checkpoint, path, tmp_path / "back", options=options)
    assert_same_folder(tmp_path / "back", path)
    verbs.mm_to_hf(checkpoint, path, tmp_path / "less", drop_extra=True, options=options)
    assert set(state_of(tmp_path / "less")) == set(state_of(hf))


def test_dropping_extras_leaves_a_true_index(hf_stacked, tmp_path):
    from safetensors.torch import load_file, save_file

    path = copy(hf_stacked, tmp_path / "hf")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    name, file = "model.language_model.layers.4.eh_proj.weight", sorted(set(index["weight_map"].values()))[0]
    save_file(load_file(path / file) | {name: torch.randn(4, 8)}, path / file, {"format": "pt"})
    index["weight_map"][name] = file
    index["metadata"]["total_size"] += 128
    index["metadata"]["total_parameters"] += 32
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    mm = to_mm(path, tmp_path / "mm")
    out = to_hf(mm, path, tmp_path / "less", drop_extra=True)
    got, before = (json.loads((p / "model.safetensors.index.json").read_text()) for p in (out, hf_stacked))
    assert got == before


def test_data_types_stay_and_like_reference_casts(hf, hf_fp32, tmp_path):
    """A checkpoint in fp32, exported against a bf16 reference: said per tensor; cast only when asked."""
    mm = to_mm(hf_fp32, tmp_path / "mm", tp=2, ep=2)
    said: list[str] = []
    verbs.mm_to_hf(open_checkpoint(mm), hf, tmp_path / "fp32", options=verbs.Options(say=said.append))
    told = [line for line in said if line.startswith("data type of")]
    assert len(told) == 62 and all(
        "F32 in the checkpoint, BF16 in the reference; written as F32" in line for line in told
    )
    got, expected = state_of(tmp_path / "fp32"), state_of(hf_fp32)
    assert all(got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "fp32/config.json").read_text())["text_config"]["dtype"] == "float32"
    to_hf(mm, hf, tmp_path / "cast", like_reference=True)
    got, like = state_of(tmp_path / "cast"), state_of(hf)
    assert all(
        got[name].dtype == like[name].dtype and torch.equal(got[name], expected[name].to(like[name].dtype))
        for name in like
    )
    assert json.loads((tmp_path / "cast/config.json").read_text())["dtype"] == "bfloat16"


def test_parts_of_one_tensor_in_two_data_types_are_refused(hf, tmp_path):
    path = copy(hf, tmp_path / "hf")
    name = "model.language_model.layers.2.self_attn.k_proj.weight"
    edit_state(path, lambda state: state.update({name: state[name].float()}))
    with pytest.raises(
        UserError, match=r"layers.2.self_attention.linear_qkv.weight: its parts have different data types.*never casts"
    ):
        to_mm(path, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()


def test_the_router_may_be_bf16(hf, tmp_path):
    path = copy(hf, tmp_path / "hf")
    edit_state(
        path, lambda state: state.update({n: t.bfloat16() for n, t in state.items() if n.endswith("mlp.gate.weight")})
    )
    mm = to_mm(path, tmp_path / "mm", tp=2)
    assert {e.dtype for e in open_checkpoint(mm).manifest.tensors if e.name.endswith("router.weight")} == {"BF16"}
    assert_same_folder(to_hf(mm, path, tmp_path / "back"), path)


def test_a_model_json_is_honoured_and_refused_where_it_disagrees(hf, tmp_path):
    model = model_config(hf).model_dump(exclude_none=True)
    model["text_decoder"]["pipeline_num_layers"] = [1, 3]
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(model))
    target = verbs.Target(layout=ParallelLayout(pp=2))
    verbs.hf_to_mm(hf, tmp_path / "mm", target, model_json=good, options=QUIET)
    assert open_checkpoint(tmp_path / "mm").manifest.split.text.nested() == [[1, 3]]
    model["text_decoder"]["rms_norm_eps"] = 1e-6
    model["image_encoder"]["vision_encoder"]["num_layers"] = 3
    bad.write_text(json.dumps(model))
    with pytest.raises(
        UserError, match=r"vision_encoder.num_layers is 3.*vision_config.depth.*text_decoder.rms_norm_eps is 1e-06"
    ):
        verbs.hf_to_mm(hf, tmp_path / "no", target, model_json=bad, options=QUIET)


def test_an_export_against_another_models_reference_is_refused(hf, tmp_path):
    mm, other = to_mm(hf, tmp_path / "mm"), hf_folder(tmp_path / "other", moe_intermediate_size=32)
    with pytest.raises(UserError, match=r"moe_ffn_hidden_size is 48.*means 32"):
        to_hf(mm, other, tmp_path / "back")


def test_config_keys_nobody_reads_are_named(hf, tmp_path):
    path, said = copy(hf, tmp_path / "hf"), []
    edit_config(path, lambda config: config["text_config"].update({"new_trick": 3}))
    verbs.hf_to_mm(path, tmp_path / "mm", verbs.Target(layout=ParallelLayout()), options=verbs.Options(say=said.append))
    assert any("not used: text_config.new_trick" in line for line in said)
