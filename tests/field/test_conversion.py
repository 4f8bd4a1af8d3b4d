"""Converted folders, loaded and computed with: a wrong layout that a round trip would undo shows in the logits."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from mm_models.cli.convert import main
from mm_models.errors import UserError
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.field.kit import loaded_case
from tests.harness import run
from tests.weights.folders import copy, edit_state, hf_folder, loaded, state_of, to_hf, to_mm

SP = {"sequence_parallel": True}
LAYOUTS = {"tp1": (1, {}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "ep2": (2, {"ep": 2})}


def computed(hf, folder, nprocs: int, degrees: dict, split: dict | None = None):
    """Every rank's view after loading `folder`; logits are Hugging Face's."""
    degrees = degrees | (SP if degrees.get("tp", 1) > 1 else {})
    results = run(loaded_case, nprocs, folder, hf, split or {}, degrees, timeout=60)
    errors = [result.worst for result in results if result.worst is not None]
    assert errors and max(errors) <= 1e-5, errors
    return results


# --- B01 ------------------------------------------------------------------------------------------------------------


def kinds(names) -> dict[str, str]:
    """One name of each kind: numbers of layers and experts do not make a kind."""
    return {re.sub(r"\d+", "N", name): name for name in sorted(names)}


def test_every_kind_of_tensor_is_missed_by_name(hf, tmp_path):
    """B01: take away one tensor of each kind, vision, projector, decoder, head: refused with that name, and nothing written."""
    state = state_of(hf)
    assert len(kinds(state)) > 35
    path = copy(hf, tmp_path / "hf")
    for name in kinds(state).values():
        save_file({other: tensor for other, tensor in state.items() if other != name}, path / "model.safetensors")
        with pytest.raises(UserError, match=f"1 missing: {re.escape(name)}"):
            to_mm(path, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()


NAMINGS = {
    "all flat": {"model.visual.": "visual.", "model.language_model.": "model."},
    "text flat": {"model.language_model.": "model."},
    "vision flat": {"model.visual.": "visual."},
    "no model prefix": {"model.": ""},
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_another_naming_is_refused_never_half_loaded(hf, tmp_path, capsys, naming):
    """B01: flat and mixed prefixes, by the command: status 2, both kinds of names shown, no output, and training's loader alike."""
    path = copy(hf, tmp_path / "hf")

    def rename(state):
        for name in list(state):
            for old, new in NAMINGS[naming].items():
                if name.startswith(old):
                    state[new + name.removeprefix(old)] = state.pop(name)
                    break

    edit_state(path, rename)
    assert (
        main(
            ["Glm4vMoeConverter", "hf_to_mm", "--cfg.hf_config.hf_dir", str(path), "--cfg.mm_dir", str(tmp_path / "mm")]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert re.search(r"\d+ missing: model\.", said) and re.search(r"\d+ unexpected: ", said), said
    assert not (tmp_path / "mm").exists()


# --- B03 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def biased(hf, tmp_path_factory):
    """Router bias [0, 1, ..., 7] x 0.1 and gate weights near zero: the bias alone decides."""
    path = copy(hf, tmp_path_factory.mktemp("field") / "biased")

    def change(state):
        for name, tensor in state.items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.arange(8) * 0.1)
            elif name.endswith("mlp.gate.weight"):
                tensor.mul_(1e-3)

    edit_state(path, change)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_router_bias_decides_after_conversion(biased, tmp_path, layout):
    """B03: every token of every layer goes to experts 6 and 7, and the logits are Hugging Face's."""
    nprocs, degrees = LAYOUTS[layout]
    results = computed(biased, to_mm(biased, tmp_path / "mm", **degrees), nprocs, degrees)
    assert {pair for result in results for pair in result.chosen} == {(6, 7)}


def test_a_missing_router_bias_stops_a_run(biased, hf, tmp_path):
    """B03: the same bias absent from a folder that is loaded directly: an error with the key, not zeros."""
    path, name = copy(biased, tmp_path / "hf"), "model.language_model.layers.2.mlp.gate.e_score_correction_bias"
    edit_state(path, lambda state: state.pop(name))
    with pytest.raises(AssertionError, match=re.escape(f"1 missing: {name}")):
        run(loaded_case, 1, path, path, {}, {}, timeout=60)


# --- B28, B54 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "tp"), [(4, 2, 24, 2), (4, 1, 16, 1), (4, 4, 16, 2), (6, 2, 32, 2)], ids=str
)
def test_logits_after_conversion_for_every_head_geometry(tmp_path, heads, groups, dim, tp):
    """B28, B54: query heads over key-value heads and head widths that are not hidden / heads, all biases random."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [dim // 4 - 2, 1, 1],
    }
    hf = hf_folder(
        tmp_path / "hf",
        dtype=torch.float32,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=dim,
        rope_parameters=rope,
    )
    assert all(state_of(hf)[f"model.language_model.layers.0.self_attn.{part}_proj.bias"].std() > 0 for part in "qkv")
    degrees = {"tp": tp} if tp > 1 else {}
    computed(hf, to_mm(hf, tmp_path / "mm", **degrees), tp, degrees)


# --- B27 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "tp", "words"),
    [
        ({}, 4, ["num_query_groups (kv heads) 2 does not divide by tp 4"]),
        ({"num_key_value_heads": 1}, 2, ["num_query_groups (kv heads) 1 does not divide by tp 2"]),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            ["num_query_groups (kv heads) 3 does not divide by tp 2"],
        ),
        (
            {"num_key_value_heads": 4, "vision_num_heads": 2},
            4,
            ["vision_encoder.num_attention_heads 2 does not divide by tp 4"],
        ),
        ({"n_shared_experts": 1, "moe_intermediate_size": 45}, 2, ["shared experts' width 45 does not divide by tp 2"]),
    ],
    ids=str,
)
def test_heads_and_widths_that_tp_does_not_divide(tmp_path, capsys, overrides, tp, words):
    """B27: refused before any file, with both numbers, by every verb that has a target layout, and by `init`."""
    from mm_models.cli.models import main as models

    hf = hf_folder(tmp_path / "hf", **overrides)
    mm = to_mm(hf, tmp_path / "mm")
    for command in (
        ["hf_to_mm", "--hf", hf, "--out", tmp_path / "out"],
        ["resplit", "--mm", mm, "--out", tmp_path / "out"],
    ):
        assert main([*map(str, command), "--tp", str(tp)]) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words), said
        assert not (tmp_path / "out").exists()
    assert models(["init", "--hf", str(hf), "--tp", str(tp), "-o", str(tmp_path / "model.json")]) == 2
    assert not (tmp_path / "model.json").exists()


# --- B30 ------------------------------------------------------------------------------------------------------------


def test_stacked_experts_compute_the_same(hf, tmp_path):
    """B30: the same model saved stacked, converted and loaded at EP 2: equal logits, and the same checkpoint bytes."""
    stacked = hf_folder(tmp_path / "stacked", dtype=torch.float32, stacked=True)
    one, two = to_mm(hf, tmp_path / "one", ep=2), to_mm(stacked, tmp_path / "two", ep=2)
    assert all(file.read_bytes() == (two / file.relative_to(one)).read_bytes() for file in one.glob("release/*/*.pt"))
    computed(stacked, two, 2, {"ep": 2})


def test_a_stacked_tensor_that_is_transposed_or_halved_is_refused(tmp_path):
    """B30: gate and up the wrong way round in shape, or one of the two stacked tensors gone."""
    path = hf_folder(tmp_path / "hf", stacked=True)
    name = "model.language_model.layers.2.mlp.experts."
    plain = state_of(path)[name + "gate_up_proj"]
    edit_state(path, lambda state: state.update({name + "gate_up_proj": plain.transpose(1, 2).contiguous()}))
    with pytest.raises(UserError, match=rf"{re.escape(name)}gate_up_proj is \(8, 64, 96\), expected \(8, 96, 64\)"):
        to_mm(path, tmp_path / "mm")
    edit_state(path, lambda state: (state.update({name + "gate_up_proj": plain}), state.pop(name + "down_proj")))
    with pytest.raises(UserError, match=rf"1 missing: {re.escape(name)}down_proj"):
        to_mm(path, tmp_path / "mm")


# --- B05 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{"ep": 1}, {"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
def test_the_sums_of_all_tensors_survive(numbered, tmp_path, layout):
    """B05: the sum of all expert tensors, and of everything else, is Hugging Face's exactly; every count adds up."""
    mm, state = to_mm(numbered, tmp_path / "mm", **layout), state_of(numbered)

    def total(tensors, experts: bool) -> float:
        return sum(t.double().sum().item() for name, t in tensors.items() if (".experts." in name) == experts)

    files = loaded(mm).values()
    assert sum(total(tensors, True) for tensors in files) == total(state, True)
    assert sum(total(tensors, False) for tensors in files) == pytest.approx(total(state, False), rel=1e-12)
    listed = open_checkpoint(mm).manifest.tensors
    elements = sum(t.numel() for tensors in files for t in tensors.values())
    assert (
        elements == sum(t.numel() for t in state.values()) == sum(torch.Size(entry.shape).numel() for entry in listed)
    )


def test_the_command_counts_what_it_read_and_lists_what_it_left(hf, tmp_path, capsys):
    """B05: what was read was written, and the rest stands on the printed list of extras."""
    path = copy(hf, tmp_path / "hf")
    extra = "model.language_model.layers.4.shared_head.norm.weight"
    edit_state(path, lambda state: state.update({extra: torch.zeros(64)}))
    assert main(["hf_to_mm", "--hf", str(path), "--out", str(tmp_path / "mm")]) == 0
    captured = capsys.readouterr()
    said, size = captured.out + captured.err, sum(t.nbytes for t in state_of(hf).values())
    assert f"{size:,} bytes read, {size:,} bytes written" in said and f"1 known extras: {extra}" in said, said
    assert to_hf(tmp_path / "mm", hf, tmp_path / "back") and compare(hf, tmp_path / "back").equal
