"""Where each element lands: the layouts of fused, split and stacked tensors, read off with torch, not by a round trip."""

from __future__ import annotations

import pytest
import torch

from mm_models.errors import UserError
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import copy, edit_config, edit_state, hf_folder, loaded, resplit, state_of, to_hf, to_mm

MOE = "text_decoder.decoder.layers.{}.mlp."
HF = "model.language_model.layers.{}."


# --- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 16), (4, 1, 16), (4, 4, 16), (4, 2, 24), (6, 2, 32)])
@pytest.mark.parametrize("tp", [1, 2])
def test_fused_qkv_is_by_kv_group(tmp_path, heads, groups, dim, tp):
    """Per group: its query heads, its key, its value; weight and bias alike; a TP rank holds whole groups."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [dim // 4 - 2, 1, 1],
    }
    overrides = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim, "rope_parameters": rope}
    hf = hf_folder(tmp_path / "hf", **overrides)
    if groups % tp:
        with pytest.raises(UserError, match=r"kv heads\) 1 does not divide by tp 2"):
            to_mm(hf, tmp_path / "mm", tp=tp)
        assert not (tmp_path / "mm").exists()
        return
    state, files = state_of(hf), loaded(to_mm(hf, tmp_path / "mm", tp=tp))
    for layer in range(4):
        for kind in ("weight", "bias"):
            q, k, v = (state[HF.format(layer) + f"self_attn.{part}_proj.{kind}"] for part in "qkv")
            rows, per = [], heads // groups
            for group in range(groups):
                rows += [q[(group * per + i) * dim : (group * per + i + 1) * dim] for i in range(per)]
                rows += [k[group * dim : (group + 1) * dim], v[group * dim : (group + 1) * dim]]
            expected = torch.cat(rows).chunk(tp)
            for rank in range(tp):
                got = files[f"mp_rank_{rank:02d}", 0][
                    f"text_decoder.decoder.layers.{layer}.self_attention.linear_qkv.{kind}"
                ]
                assert torch.equal(got, expected[rank])
    assert_round_trip(tmp_path, hf)


def assert_round_trip(tmp_path, hf):
    back, state = state_of(to_hf(tmp_path / "mm", hf, tmp_path / "back")), state_of(hf)
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)


def test_vision_qkv_is_in_thirds(hf, tmp_path):
    """The field's own layout of this tower: Hugging Face's [q; k; v] as it is; a TP rank has its heads of each third."""
    fused, files = state_of(hf)["model.visual.blocks.1.attn.qkv.weight"], loaded(to_mm(hf, tmp_path / "mm", tp=2))
    name = "image_encoder.encoder.blocks.layers.1.self_attention.qkv.weight"
    for rank in range(2):
        expected = torch.cat([third.chunk(2)[rank] for third in fused.chunk(3)])
        assert torch.equal(files[f"mp_rank_0{rank}", 0][name], expected)
    (whole,) = loaded(to_mm(hf, tmp_path / "one")).values()
    assert torch.equal(whole[name], fused)


def test_a_bias_switched_off_is_not_dropped_and_one_switched_on_is_not_invented(hf, tmp_path):
    path = copy(hf, tmp_path / "off")
    edit_config(path, lambda config: config["text_config"].update(attention_bias=False))
    with pytest.raises(UserError, match=r"12 unexpected: .*self_attn.k_proj.bias"):
        to_mm(path, tmp_path / "mm")
    path = copy(hf, tmp_path / "on")
    edit_state(path, lambda state: [state.pop(name) for name in list(state) if name.endswith("q_proj.bias")])
    with pytest.raises(UserError, match=r"4 missing: .*layers.0.self_attn.q_proj.bias"):
        to_mm(path, tmp_path / "mm")
    path = copy(hf, tmp_path / "o")
    edit_state(path, lambda state: state.update({HF.format(1) + "self_attn.o_proj.bias": torch.randn(64)}))
    with pytest.raises(UserError, match=r"1 unexpected: .*layers.1.self_attn.o_proj.bias"):
        to_mm(path, tmp_path / "mm")


@pytest.mark.parametrize(
    ("heads", "groups", "words"), [(4, 3, "num_attention_heads 4 does not divide by num_query_groups 3")]
)
def test_head_counts_that_do_not_divide_are_refused(hf, tmp_path, heads, groups, words):
    path = copy(hf, tmp_path / "hf")
    edit_config(
        path, lambda config: config["text_config"].update(num_attention_heads=heads, num_key_value_heads=groups)
    )
    with pytest.raises(UserError, match=words):
        to_mm(path, tmp_path / "mm")


def test_three_kv_heads_on_two_ranks_are_refused(tmp_path):
    hf = hf_folder(tmp_path / "hf", num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(UserError, match=r"kv heads\) 3 does not divide by tp 2"):
        to_mm(hf, tmp_path / "mm", tp=2)
    assert not (tmp_path / "mm").exists()


# --- splits -------------------------------------------------------------------------------------------------------


def test_every_kind_of_split(hf, tmp_path):
    """Column, row, gate/up halves, vocabulary, replicated: rank 1 of TP 2."""
    state, rank = state_of(hf), loaded(to_mm(hf, tmp_path / "mm", tp=2))["mp_rank_01", 0]
    layer = HF.format(0)
    gate, up = (state[layer + f"mlp.{part}_proj.weight"] for part in ("gate", "up"))
    expected = {
        "text_decoder.embedding.word_embeddings.weight": state["model.language_model.embed_tokens.weight"][160:],
        "text_decoder.output_layer.weight": state["lm_head.weight"][160:],
        "text_decoder.decoder.layers.0.self_attention.linear_proj.weight": state[layer + "self_attn.o_proj.weight"][
            :, 64:
        ],
        "text_decoder.decoder.layers.0.mlp.linear_fc1.weight": torch.cat([gate[48:], up[48:]]),
        "text_decoder.decoder.layers.0.mlp.linear_fc2.weight": state[layer + "mlp.down_proj.weight"][:, 48:],
        "text_decoder.decoder.layers.0.pre_mlp_layernorm.weight": state[layer + "post_attention_layernorm.weight"],
        "text_decoder.decoder.final_layernorm.weight": state["model.language_model.norm.weight"],
        "image_encoder.encoder.blocks.layers.1.pre_mlp_layernorm.weight": state["model.visual.blocks.1.norm2.weight"],
        "image_encoder.encoder.blocks.final_layernorm.weight": state["model.visual.post_layernorm.weight"],
        "image_encoder.encoder.patch_embed.proj.weight": state["model.visual.patch_embed.proj.weight"],
        "image_encoder.encoder.downsample.weight": state["model.visual.downsample.weight"],
        "image_encoder.projector.gate_proj.weight": state["model.visual.merger.gate_proj.weight"],
        MOE.format(2) + "router.weight": state[HF.format(2) + "mlp.gate.weight"],
        MOE.format(2) + "shared_experts.linear_fc2.weight": state[HF.format(2) + "mlp.shared_experts.down_proj.weight"][
            :, 48:
        ],
    }
    for name, tensor in expected.items():
        assert torch.equal(rank[name], tensor), name


# --- experts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def constant_experts(tmp_path_factory):
    """Expert e filled with e + 1 in gate, -(e + 1) in up and (e + 1) / 2 in down."""
    hf = hf_folder(tmp_path_factory.mktemp("hf") / "constant")

    def fill(state):
        for name, tensor in state.items():
            if ".experts." in name:
                value = int(name.split(".experts.")[1].split(".")[0]) + 1
                tensor.fill_(
                    {"gate": value, "up": -value, "down": value / 2}[name.split(".")[-2].removesuffix("_proj")]
                )

    edit_state(hf, fill)
    return hf


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (1, 2)])
def test_a_rank_holds_its_own_experts(constant_experts, tmp_path, ep, etp):
    mm = to_mm(constant_experts, tmp_path / "mm", ep=ep, etp=etp)
    per, total = 8 // ep, 0.0
    for (folder, _), tensors in loaded(mm).items():
        names = [name for name in tensors if ".experts." in name]
        if not names:
            continue
        rank = int(folder.split("_")[-1]) if folder.startswith("expert_") else 0
        wanted = torch.arange(rank * per + 1, (rank + 1) * per + 1)
        for name in names:
            tensor = tensors[name].float()
            total += tensor.double().sum().item()
            if name.endswith("gate_up_proj"):
                gate, up = tensor.chunk(2, dim=1)
                assert tensor.shape == (per, 96 // etp, 64)
                assert (gate == wanted[:, None, None]).all() and (up == -wanted[:, None, None]).all()
            else:
                assert tensor.shape == (per, 64, 48 // etp)
                assert (tensor == wanted[:, None, None] / 2).all()
    expected = sum(t.double().sum().item() for name, t in state_of(constant_experts).items() if ".experts." in name)
    assert total == expected


def test_ep_chains_of_constant_experts(constant_experts, tmp_path):
    mm = to_mm(constant_experts, tmp_path / "0")
    for step, layout in enumerate([{"ep": 2}, {"ep": 4}, {}], 1):
        mm = resplit(mm, tmp_path / str(step), **layout)
    one, two = loaded(tmp_path / "0"), loaded(mm)
    assert all(
        torch.equal(two[place][name], tensor) for place, tensors in one.items() for name, tensor in tensors.items()
    )


def test_both_expert_layouts_at_once_and_a_missing_expert_are_refused(hf, tmp_path):
    path = copy(hf, tmp_path / "both")
    edit_state(
        path, lambda state: state.update({HF.format(2) + "mlp.experts.gate_up_proj": torch.randn(8, 96, 64).bfloat16()})
    )
    with pytest.raises(
        UserError,
        match=r"two layouts, per_expert \(.*experts.0.down_proj.weight\) and stacked_hf \(.*layers.2.mlp.experts.gate_up_proj\)",
    ):
        to_mm(path, tmp_path / "mm")
    path = copy(hf, tmp_path / "missing")
    edit_state(path, lambda state: state.pop(HF.format(3) + "mlp.experts.5.up_proj.weight"))
    with pytest.raises(UserError, match=r"1 missing: model.language_model.layers.3.mlp.experts.5.up_proj.weight"):
        to_mm(path, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()


# --- the router bias ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"ep": 2}, {"tp": 2}], ids=str)
def test_the_correction_bias_arrives_in_fp32(hf, tmp_path, layout):
    path, bias = copy(hf, tmp_path / "hf"), torch.arange(8) * 0.1
    edit_state(path, lambda state: [state[name].copy_(bias) for name in state if name.endswith("correction_bias")])
    found = [
        t
        for tensors in loaded(to_mm(path, tmp_path / "mm", **layout)).values()
        for name, t in tensors.items()
        if name.endswith("correction_bias")
    ]
    assert len(found) == 3 * layout.get("tp", 1)
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, bias) for tensor in found)


def test_a_missing_correction_bias_is_refused_by_name(hf, tmp_path):
    path = copy(hf, tmp_path / "hf")
    edit_state(path, lambda state: state.pop(HF.format(1) + "mlp.gate.e_score_correction_bias"))
    with pytest.raises(UserError, match=r"1 missing: model.language_model.layers.1.mlp.gate.e_score_correction_bias"):
        to_mm(path, tmp_path / "mm")


# --- names --------------------------------------------------------------------------------------------------------


def test_a_missing_or_foreign_prefix_is_refused_by_name(hf, tmp_path):
    """One vision tensor gone; the vision tower under a flat prefix and the text not: never half loaded."""
    path = copy(hf, tmp_path / "one")
    edit_state(path, lambda state: state.pop("model.visual.blocks.1.norm2.weight"))
    with pytest.raises(UserError, match=r"1 missing: model.visual.blocks.1.norm2.weight"):
        to_mm(path, tmp_path / "mm")
    path = copy(hf, tmp_path / "mixed")

    def flatten(state):
        for name in [name for name in state if name.startswith("model.visual.")]:
            state[name.removeprefix("model.")] = state.pop(name)

    edit_state(path, flatten)
    with pytest.raises(UserError, match=r"27 missing: model.visual.*27 unexpected: visual\."):
        to_mm(path, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(hf, tmp_path):
    path, name = copy(hf, tmp_path / "hf"), "model.visual.merger.proj.weight"
    edit_state(path, lambda state: state.update({name: torch.zeros(64, 32)}))
    with pytest.raises(UserError, match=rf"1 of another shape: {name} is \(64, 32\), expected \(64, 64\)"):
        to_mm(path, tmp_path / "mm")


# --- stages -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Eight text layers; the norm of layer i is filled with i."""
    hf = hf_folder(tmp_path_factory.mktemp("hf") / "numbered", num_hidden_layers=8)
    edit_state(
        hf,
        lambda state: [
            t.fill_(int(n.split(".")[3])) for n, t in state.items() if n.endswith(".input_layernorm.weight")
        ],
    )
    return hf


def test_virtual_chunks_are_chunk_major(numbered, tmp_path):
    mm = to_mm(numbered, tmp_path / "mm", pp=2, vpp=2)
    held = {}
    for (folder, chunk), tensors in loaded(mm).items():
        norms = {
            name: t[0].item()
            for name, t in tensors.items()
            if name.endswith("input_layernorm.weight") and name.startswith("text")
        }
        held[folder, chunk] = [
            norms[f"text_decoder.decoder.layers.{i}.input_layernorm.weight"] for i in range(len(norms))
        ]
    assert held == {
        ("mp_rank_00_000", 0): [0, 1],
        ("mp_rank_00_001", 0): [2, 3],
        ("mp_rank_00_000", 1): [4, 5],
        ("mp_rank_00_001", 1): [6, 7],
    }
    one = resplit(resplit(mm, tmp_path / "four", pp=4), tmp_path / "one")
    norms = loaded(one)["mp_rank_00", 0]
    assert [norms[f"text_decoder.decoder.layers.{i}.input_layernorm.weight"][0].item() for i in range(8)] == list(
        range(8)
    )
    back, state = state_of(to_hf(one, numbered, tmp_path / "back")), state_of(numbered)
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"text": [2, 2]}, "sum 4, model 5"),
        ({"text": [3, 3]}, "sum 6, model 5"),
        ({"text": [5]}, "expected 2"),
        ({"text": [6, -1]}, "non-negative"),
        ({"text": "[2,3]"}, "expected a list"),
        ({"text": [[2, 3], [0, 0]]}, "expected 1"),
        ({"vision": [3, 0], "text": [2, 3]}, "sum 3, model 2"),
        ({"vision": [0, 2], "text": [2, 3]}, "before the last vision layer"),
    ],
    ids=str,
)
def test_layer_lists_that_do_not_fit_are_refused(tmp_path_factory, tmp_path, lists, words):
    hf = hf_folder(tmp_path / "hf", num_hidden_layers=5)
    with pytest.raises(UserError, match=words):
        to_mm(hf, tmp_path / "mm", pp=2, **lists)
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize("lists", [[2, 3], [3, 2], None])
def test_no_layer_is_lost_when_they_do_not_divide(tmp_path, lists):
    hf = hf_folder(tmp_path / "hf", num_hidden_layers=5)
    files = loaded(to_mm(hf, tmp_path / "mm", pp=2, text=lists))
    norms = [
        name
        for tensors in files.values()
        for name in tensors
        if name.startswith("text") and name.endswith("input_layernorm.weight")
    ]
    assert len(norms) == 5


@pytest.mark.parametrize(
    "lists",
    [
        {"vision": [2, 0, 0, 0], "text": [0, 1, 2, 1]},
        {"vision": [0, 2, 0, 0], "text": [0, 0, 2, 2]},
        {"vision": [1, 1, 0, 0], "text": [0, 2, 2, 0]},
        {"vision": [0, 0, 0, 2], "text": [0, 0, 0, 4]},
    ],
    ids=str,
)
def test_ends_stand_on_exactly_one_stage(hf, tmp_path, lists):
    files = loaded(to_mm(hf, tmp_path / "mm", pp=4, **lists))
    first_text, last_vision = (
        next(i for i, n in enumerate(lists["text"]) if n),
        max(i for i, n in enumerate(lists["vision"]) if n),
    )
    expected = {
        "text_decoder.embedding.word_embeddings.weight": first_text,
        "text_decoder.decoder.final_layernorm.weight": 3,
        "text_decoder.output_layer.weight": 3,
        "image_encoder.projector.proj.weight": last_vision,
        "image_encoder.encoder.downsample.bias": last_vision,
        "image_encoder.encoder.patch_embed.proj.bias": next(i for i, n in enumerate(lists["vision"]) if n),
    }
    for name, stage in expected.items():
        assert [int(folder[-3:]) for (folder, _), tensors in files.items() if name in tensors] == [stage], name


# --- expert and tensor parallel degrees -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"ep": 3}, r"num_moe_experts 8 does not divide by ep 3 \(possible: 1, 2, 4, 8\)"),
        ({"ep": 16}, "num_moe_experts 8 does not divide by ep 16"),
        ({"etp": 5}, "moe_ffn_hidden_size 48 does not divide by etp 5"),
        ({"tp": 3}, "vocab_size 320 does not divide by tp 3"),
        ({"pp": 1, "vpp": 2}, "needs pp of at least 2"),
    ],
    ids=str,
)
def test_degrees_that_do_not_divide_are_refused_before_any_file(hf, tmp_path, layout, words):
    with pytest.raises(UserError, match=words):
        to_mm(hf, tmp_path / "mm", **layout)
    assert not (tmp_path / "mm").exists()


def test_folders_are_named_by_their_grids(hf, tmp_path):
    checkpoint = open_checkpoint(to_mm(hf, tmp_path / "mm", tp=2, pp=2, ep=2, etp=1, text=[2, 2], vision=[2, 0]))
    assert sorted({entry.file.split("/")[0] for entry in checkpoint.manifest.tensors}) == [
        *(f"expert_rank_00_{pp:03d}_{ep:03d}" for pp in range(2) for ep in range(2)),
        *(f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)),
    ]
