"""Hugging Face names of either spelling, part by part, and the head of a tied model that a folder holds all the same."""

from __future__ import annotations

import filecmp
import re
from pathlib import Path

import pytest
import torch

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import live
from mm_models.weights.check import compare
from mm_models.weights.dcp.folder import open_dcp
from mm_models.weights.live_shards import load_shards
from mm_models.weights.model_map import shard_coords
from tests.weights.dcp.kit import rank_shards, whole_shapes
from tests.weights.folders import (
    assert_same_folder,
    copy,
    edit_config,
    edit_state,
    from_dcp,
    hf_folder,
    model_config,
    state_of,
    to_dcp,
    to_hf,
    to_mm,
)

QWEN = ("qwen2_5_vl", pytest.param("qwen2_vl", marks=pytest.mark.slow))
NAMINGS = {"vision old": ("visual.", "model.visual."), "text old": ("model.", "model.language_model.")}


@pytest.fixture(scope="session", params=QWEN)
def both(request, tmp_path_factory) -> tuple[Path, Path]:
    """One model as the hub has it (older names) and as transformers names it in memory."""
    path = tmp_path_factory.mktemp(request.param)
    return tuple(hf_folder(path / name, family=request.param, stacked=name == "new") for name in ("old", "new"))


def mixed(path: Path, old: Path, new: Path, naming: str) -> Path:
    """`new` with one part in the older spelling."""
    copy(new, path)
    ours, theirs = NAMINGS[naming]

    def rename(state):
        for name in [name for name in state if name.startswith(theirs)]:
            state[ours + name.removeprefix(theirs)] = state.pop(name)

    edit_state(path, rename)
    assert set(state_of(path)) - set(state_of(new)) <= set(state_of(old))
    return path


def same_weights(one: Path, two: Path) -> bool:
    files = sorted(
        file.relative_to(one) for pattern in ("*.pt", "*.distcp", ".metadata") for file in one.rglob(pattern)
    )
    assert files
    return all(filecmp.cmp(one / file, two / file, shallow=False) for file in files)


def test_either_naming_gives_the_same_bytes_and_gets_its_own_names_back(both, tmp_path):
    old, new = both
    assert not any(
        name.startswith("model.visual.") for name in state_of(old)
    ) and "model.visual.patch_embed.proj.weight" in state_of(new)
    folders = {"old": old, "new": new, **{name: mixed(tmp_path / name, old, new, name) for name in NAMINGS}}
    layout = {"tp": 2, "pp": 2}
    mm, dcp = to_mm(new, tmp_path / "mm", **layout), to_dcp(new, tmp_path / "dcp")
    for name, folder in folders.items():
        assert same_weights(mm, to_mm(folder, tmp_path / f"mm {name}", **layout)), name
        assert same_weights(dcp, to_dcp(folder, tmp_path / f"dcp {name}")), name
        assert_same_folder(to_hf(mm, folder, tmp_path / f"mm to {name}"), folder)
        assert_same_folder(from_dcp(dcp, folder, tmp_path / f"dcp to {name}"), folder)
        assert compare(folder, mm).equal and compare(dcp, folder).equal and compare(old, folder).equal, name


def test_a_part_under_both_names_is_refused(both, tmp_path):
    old, _ = both
    name, again = "visual.blocks.1.norm1.weight", "model.visual.blocks.1.norm1.weight"
    path = copy(old, tmp_path / "hf")
    edit_state(path, lambda state: state.update({again: state[name].clone()}))
    for convert in (to_mm, to_dcp):
        with pytest.raises(
            UserError, match=rf"{path}: the vision_encoder stands under two names, '.*' and '{re.escape(again)}'"
        ):
            convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_live_models_of_both_targets_read_either_naming(both, tmp_path):
    _, new = both
    model, layout = model_config(new), ParallelLayout()
    shapes = whole_shapes(model)
    state = state_of(new)
    for folder in both:
        shards = rank_shards(shapes, 1, 0, dtype=torch.bfloat16)
        load_shards(shards, folder, model=model)
        assert all(torch.equal(shard.tensor, state[name]) for name, shard in shards.items())
    split = model.split(layout)
    local = live.build(model).local(shard_coords(), layout, split)
    held = []
    for folder in both:
        tensors = {name: torch.full(one.shape, float("nan"), dtype=torch.bfloat16) for name, one in local.items()}
        live.load_into(tensors, folder, model=model, layout=layout, coords=shard_coords())
        held.append(tensors)
    assert all(torch.equal(tensor, held[1][name]) for name, tensor in held[0].items())


def test_a_missing_tensor_is_named_as_the_folder_names_it(both, tmp_path):
    for folder, name in zip(both, ("visual.blocks.0.attn.qkv.bias", "model.visual.blocks.0.attn.qkv.bias")):
        path = copy(folder, tmp_path / name)
        edit_state(path, lambda state, name=name: state.pop(name))
        for convert in (to_mm, to_dcp):
            with pytest.raises(UserError, match=rf"1 missing: {re.escape(name)}\."):
                convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- tied ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("tied") / "hf", family="qwen2_5_vl", tie_word_embeddings=True)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_tied_folder_with_and_without_a_head(tied, tmp_path, layout):
    """The head that is the embedding again changes no checkpoint, and is there again after an export."""
    assert "lm_head.weight" not in state_of(tied)
    path = copy(tied, tmp_path / "headed")
    edit_state(path, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    mm, dcp = to_mm(tied, tmp_path / "mm", **layout), to_dcp(tied, tmp_path / "dcp")
    assert same_weights(mm, to_mm(path, tmp_path / "mm2", **layout)) and same_weights(
        dcp, to_dcp(path, tmp_path / "dcp2")
    )
    assert not any("lm_head" in key for key in open_dcp(dcp).metadata.tensors)
    for folder in (tied, path):
        assert_same_folder(to_hf(mm, folder, tmp_path / f"mm to {folder.name}"), folder)
        assert_same_folder(from_dcp(dcp, folder, tmp_path / f"dcp to {folder.name}"), folder)
        assert compare(folder, mm).equal
    shards = rank_shards(whole_shapes(model_config(path)), 1, 0, dtype=torch.bfloat16)
    load_shards(shards, path, model=model_config(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda head: head.view(torch.int16).__setitem__((319, 63), 1), "differs from model.safetensors: model.embed_tokens.weight"),
        (lambda head: head.resize_(319, 64), r"lm_head.weight is \(319, 64\), expected \(320, 64\)"),
    ],
)  # fmt: skip
def test_a_tied_folder_with_another_head_is_refused(tied, tmp_path, change, words):
    path = copy(tied, tmp_path / "hf")

    def add(state):
        head = state["model.embed_tokens.weight"].clone()
        change(head)
        state["lm_head.weight"] = head

    edit_state(path, add)
    for convert in (to_mm, to_dcp):
        with pytest.raises(UserError, match=words):
            convert(path, tmp_path / "out")
    shards = rank_shards(whole_shapes(model_config(path)), 1, 0, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=words):
        load_shards(shards, path, model=model_config(path))
    assert not (tmp_path / "out").exists()


def test_untied_without_a_head_and_a_head_that_is_called_tied(tied, both, tmp_path):
    path = copy(tied, tmp_path / "untied")
    edit_config(path, lambda config: config.update(tie_word_embeddings=False))
    with pytest.raises(UserError, match=r"1 missing: lm_head\.weight"):
        to_mm(path, tmp_path / "out")
    path = copy(both[0], tmp_path / "tied")
    edit_config(path, lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(
        UserError, match=r"the model is tied .*lm_head.weight differs .*set tie_word_embeddings to false"
    ):
        to_mm(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
