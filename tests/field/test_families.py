"""The conversion cases on the families that are dense: Qwen2-VL, Qwen2.5-VL and GLM-4.1V."""

from __future__ import annotations

import filecmp
import itertools
import json
import re

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mm_models.cli.convert import main
from mm_models.errors import UserError
from mm_models.mcore.arguments import parse
from mm_models.mcore.checkpoint import check_source
from mm_models.mcore.validation import plan
from tests.field.test_conversion import computed
from tests.field.test_pipeline import NORM
from tests.mcore.test_training import topology
from tests.mcore.training_kit import tiny_flags
from tests.weights.folders import (
    copy,
    edit_state,
    from_dcp,
    hf_folder,
    loaded,
    model_config,
    resplit,
    state_of,
    to_hf,
    to_mm,
)

CONVERTERS = {"qwen2_vl": "Qwen2VLConverter", "qwen2_5_vl": "Qwen2_5_VLConverter", "glm4v": "GlmConverter"}


def folder(path, family: str, **options):
    """fp32, in one file, with the names that the hub has."""
    return hf_folder(path, family=family, dtype=torch.float32, **options)


def slow(cases: list[tuple]) -> list:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


# --- B01 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_old_and_new_names_convert_alike_and_come_back_as_they_were(tmp_path, capsys, family):
    """B01: by the field's commands, both namings: outputs are byte-equal, a deleted vision key is named with status 2 and no
    output, exports have the reference's names and load in transformers without a missing or unexpected key."""
    made, deleted = {}, "visual.blocks.1.mlp.{}.bias".format("fc1" if family == "qwen2_vl" else "up_proj")
    for naming in ("old", "new"):
        hf = folder(tmp_path / naming, family, stacked=naming == "new")
        mm, dcp = tmp_path / f"mm {naming}", tmp_path / f"dcp {naming}"
        layout = ["--cfg.parallel_config.llm_pp_layers", "[[1,3]]", "--cfg.parallel_config.tp_size", "2"]
        source = ["--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir", str(mm)]
        assert main([CONVERTERS[family], "hf_to_mm", *source, *layout]) == 0
        assert main([CONVERTERS[family], "hf_to_dcp", "--hf_dir", str(hf), "--save_dir", str(dcp)]) == 0
        made[naming] = sorted([*mm.rglob("*.pt"), *dcp.rglob("*.distcp"), *dcp.rglob(".metadata")])
        for out in (to_hf(mm, hf, tmp_path / f"mm {naming} back"), from_dcp(dcp, hf, tmp_path / f"dcp {naming} back")):
            assert state_of(out).keys() == state_of(hf).keys()
            _, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        gone = copy(hf, tmp_path / f"{naming} less")
        edit_state(gone, lambda state, naming=naming: state.pop(("model." if naming == "new" else "") + deleted))
        capsys.readouterr()
        for verb in ("hf_to_mm", "hf_to_dcp"):
            assert main([verb, "--hf", str(gone), "--out", str(tmp_path / "no")]) == 2
            assert f"1 missing: {'model.' if naming == 'new' else ''}{deleted}." in capsys.readouterr().err
        assert not (tmp_path / "no").exists()
    assert len(made["old"]) == len(made["new"]) == 4 + 2
    assert all(filecmp.cmp(one, two, shallow=False) for one, two in zip(made["old"], made["new"], strict=True))


# --- B24, B25 -------------------------------------------------------------------------------------------------------


def numbered(path, family: str, **options):
    """The input norm of decoder layer i holds i + 1."""
    hf = folder(path, family, **options)

    def fill(state):
        for name, tensor in state.items():
            if found := re.search(r"(?<!visual\.)layers\.(\d+)\.input_layernorm", name):
                tensor.fill_(int(found[1]) + 1)

    edit_state(hf, fill)
    return hf


SPLITS = [
    # family, processes, degrees, lists, layers of the decoder by rank
    ("qwen2_vl", 2, {"pp": 2}, {"vision": [2, 0], "text": [1, 3]}, [[0], [1, 2, 3]]),
    ("qwen2_5_vl", 2, {"pp": 2, "vpp": 2}, {"vision": [[1, 2], [1, 0]], "text": [[0, 0], [1, 3]]}, [[0], [1, 2, 3]]),
    ("glm4v", 2, {"pp": 2}, {"vision": [0, 2], "text": [0, 4]}, [[], [0, 1, 2, 3]]),
]
MORE = [
    ("qwen2_vl", 2, {"pp": 2}, {"vision": [2, 0], "text": [4, 0]}, [[0, 1, 2, 3], []]),
    ("qwen2_vl", 2, {"pp": 2}, {"vision": [0, 2], "text": [0, 4]}, [[], [0, 1, 2, 3]]),
    ("qwen2_vl", 4, {"pp": 4}, {"vision": [2, 0, 0, 0], "text": [0, 1, 2, 1]}, [[], [0], [1, 2], [3]]),
    ("qwen2_5_vl", 4, {"pp": 4}, {"vision": [1, 2, 1, 0], "text": [0, 0, 1, 3]}, [[], [], [0], [1, 2, 3]]),
    ("glm4v", 2, {"pp": 2, "vpp": 2}, {"vision": [[1, 1], [0, 0]], "text": [[0, 1], [1, 2]]}, [[1], [0, 2, 3]]),
]


@pytest.mark.parametrize(("family", "nprocs", "degrees", "split", "expected"), [*SPLITS, *slow(MORE)], ids=str)
def test_every_layer_is_where_the_lists_put_it(tmp_path, family, nprocs, degrees, split, expected):
    """B24, B25: the converted folder, loaded: layer i's norm holds i + 1 on the rank that the lists name, and the logits are
    Hugging Face's, at stages without a ViT, without a decoder layer, and on virtual chunks."""
    hf = numbered(tmp_path / "hf", family)
    mm = to_mm(hf, tmp_path / "mm", **degrees, **split)
    results = computed(hf, mm, nprocs, degrees, {f"{part}_layers": rows for part, rows in split.items()})
    for result, layers in zip(results, expected, strict=True):
        assert result.constants == {NORM.format(i): [float(i + 1)] for i in layers}


def test_eight_layers_on_virtual_chunks_come_back_in_order(tmp_path):
    """B25: chunk-major order in the files, `mm_to_hf` of a folder with virtual chunks, and PP2·VPP2 -> PP4 -> one."""
    hf = numbered(tmp_path / "hf", "qwen2_vl", num_hidden_layers=8)
    mm = to_mm(hf, tmp_path / "mm", pp=2, vpp=2)
    held = {
        place: sorted(int(t[0]) - 1 for name, t in tensors.items() if name.startswith("text") and "input_layernorm" in name)
        for place, tensors in loaded(mm).items()
    }  # fmt: skip
    assert held == {
        ("mp_rank_00_000", 0): [0, 1], ("mp_rank_00_001", 0): [2, 3],
        ("mp_rank_00_000", 1): [4, 5], ("mp_rank_00_001", 1): [6, 7],
    }  # fmt: skip
    state = state_of(hf)
    for source in (mm, resplit(resplit(mm, tmp_path / "four", pp=4), tmp_path / "one")):
        back = state_of(to_hf(source, hf, tmp_path / f"back {source.name}"))
        assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_a_run_with_other_lists_than_the_folders_is_refused(tmp_path):
    """B24: converted with ViT [2,0] and decoder [1,3]: a run that says the same is accepted, another decoder or ViT list and
    swapped tp and pp are refused with both, before a process starts."""
    hf = folder(tmp_path / "hf", "qwen2_vl")
    mm = to_mm(hf, tmp_path / "mm", pp=2, vision=[2, 0], text=[1, 3])
    content = model_config(hf).model_dump(mode="json", exclude_none=True)

    def source(vision, text, *flags: str, world: int = 2):
        argv = [*tiny_flags(tmp_path, *flags), "--load", str(mm)]
        content["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = vision
        content["text_decoder"]["pipeline_num_layers"] = text
        (tmp_path / "model.json").write_text(json.dumps(content))
        return check_source(plan(parse(argv), world))

    assert source([2, 0], [1, 3], *topology(pp=2)).checkpoint is not None
    for vision, text in (([2, 0], [2, 2]), ([1, 1], [0, 4])):
        words = rf"vision \[\[2, 0\]\], text \[\[1, 3\]\] there, vision \[{re.escape(str(vision))}\], text \[{re.escape(str(text))}\] here"
        with pytest.raises(UserError, match=words):
            source(vision, text, *topology(pp=2))
    with pytest.raises(UserError, match=r"tp 1 there, 2 here; pp 2 there, 1 here"):
        source([2], [4], *topology(tp=2), "--sequence-parallel")


# --- B27 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides", "tp", "words"),
    [
        ("qwen2_vl", {}, 4, "num_query_groups (kv heads) 2 does not divide by tp 4"),
        ("qwen2_5_vl", {"num_key_value_heads": 1}, 2, "num_query_groups (kv heads) 1 does not divide by tp 2"),
        ("glm4v", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "vision_out_hidden_size": 96}, 2,
         "num_query_groups (kv heads) 3 does not divide by tp 2"),
        ("qwen2_5_vl", {"vision_intermediate_size": 47}, 2, "ffn_hidden_size 47 does not divide by tp 2"),
    ],
    ids=str,
)  # fmt: skip
def test_heads_and_widths_that_tp_does_not_divide(tmp_path, capsys, family, overrides, tp, words):
    """B27: refused before any file, with both numbers, by the verbs that have a target layout."""
    hf = folder(tmp_path / "hf", family, **overrides)
    mm = to_mm(hf, tmp_path / "mm")
    for command in (["hf_to_mm", "--hf", hf], ["resplit", "--mm", mm]):
        assert main([*map(str, command), "--out", str(tmp_path / "out"), "--tp", str(tp)]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


# --- B28, B54 -------------------------------------------------------------------------------------------------------

ROPE = {16: [2, 3, 3], 24: [4, 3, 5]}
HEADS = [
    # family, heads, kv heads, head dimension, TP
    ("qwen2_vl", 4, 2, 24, 2),
    ("qwen2_5_vl", 4, 1, 16, 1),
]
GRID = itertools.product(CONVERTERS, (4,), (1, 2, 4), (16, 24), (1, 2))
REST = [case for case in GRID if case[2] >= case[4] and case not in HEADS]


@pytest.mark.parametrize(("family", "heads", "groups", "dim", "tp"), [*HEADS, *slow(REST)], ids=str)
def test_logits_for_every_head_geometry(tmp_path, family, heads, groups, dim, tp):
    """B28, B54: query heads over key-value heads and head widths, all biases random: rows by group in the files, weights and
    biases alike, and Hugging Face's logits from the converted folder."""
    width, sections = heads * dim, ROPE[dim]
    vision = {"vision_hidden_size" if family == "qwen2_vl" else "vision_out_hidden_size": width}
    if family == "glm4v":  # half of a head is rotated
        sections = {16: [1, 1, 2], 24: [2, 1, 3]}[dim]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if family == "glm4v":
        rope["partial_rotary_factor"] = 0.5
    hf = folder(tmp_path / "hf", family, num_attention_heads=heads, num_key_value_heads=groups, hidden_size=width,
                rope_parameters=rope, **vision)  # fmt: skip
    state = state_of(hf)
    layer = next(name for name in state if name.endswith("layers.1.self_attn.q_proj.bias")).removesuffix("q_proj.bias")
    (files,) = loaded(to_mm(hf, tmp_path / "one")).values()
    for kind in ("weight", "bias"):
        q, k, v = (state[f"{layer}{part}_proj.{kind}"].split(dim) for part in "qkv")
        per, rows = heads // groups, []
        for group in range(groups):
            rows += [*q[group * per : (group + 1) * per], k[group], v[group]]
        fused = files[f"text_decoder.decoder.layers.1.self_attention.linear_qkv.{kind}"]
        assert torch.equal(fused, torch.cat(rows)) and fused.std() > 0, kind
    degrees = {"tp": tp} if tp > 1 else {}
    computed(hf, to_mm(hf, tmp_path / "mm", **degrees), tp, degrees)


# --- B54 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONVERTERS)
def test_biases_that_are_missing_or_too_many_are_named(tmp_path, capsys, family):
    """B54: the switch off, the files without biases, and a bias on the output projection: each refused by name."""
    hf = folder(tmp_path / "hf", family)
    content = model_config(hf).model_dump(mode="json", exclude_none=True)
    content["text_decoder"]["add_qkv_bias"] = False
    (tmp_path / "model.json").write_text(json.dumps(content))
    out = ["--out", str(tmp_path / "out")]
    assert main(["hf_to_mm", "--hf", str(hf), *out, "--model", str(tmp_path / "model.json")]) == 2
    assert "add_qkv_bias" in capsys.readouterr().err
    layer = next(name for name in state_of(hf) if name.endswith("layers.1.self_attn.q_proj.bias")).removesuffix(
        "q_proj.bias"
    )
    less, more = copy(hf, tmp_path / "less"), copy(hf, tmp_path / "more")
    edit_state(
        less, lambda state: [state.pop(name) for name in list(state) if re.search(r"self_attn\.[qkv]_proj\.bias", name)]
    )
    edit_state(more, lambda state: state.update({f"{layer}o_proj.bias": torch.ones(64)}))
    for verb in ("hf_to_mm", "hf_to_dcp"):
        assert main([verb, "--hf", str(less), *out]) == 2
        said = capsys.readouterr().err
        assert "12 missing: " in said and f"{layer}k_proj.bias" in said
        assert main([verb, "--hf", str(more), *out]) == 2
        assert f"1 unexpected: {layer}o_proj.bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
