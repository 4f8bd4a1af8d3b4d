"""`check` finds every difference between two folders, whatever their kinds and layouts; `inspect` says what they are."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from mm_models.errors import UserError
from mm_models.weights.check import compare
from mm_models.weights.describe import describe
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import copy, edit_state, to_dcp, to_mm


def flip(file, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 16
    file.write_bytes(data)


@pytest.fixture(scope="module")
def mm(hf, tmp_path_factory):
    return to_mm(hf, tmp_path_factory.mktemp("mm") / "mm", tp=2, pp=2, ep=2)


def test_equal_folders_of_every_kind(hf, hf_stacked, mm, tmp_path):
    other = to_mm(hf_stacked, tmp_path / "mm", pp=4)
    for a, b in ((hf, hf), (hf, hf_stacked), (hf, mm), (mm, hf_stacked), (mm, other)):
        result = compare(a, b)
        assert result.equal and result.lines[-1].endswith("all equal"), result.lines


def test_a_flipped_bit_is_found_and_named(hf, mm, tmp_path):
    """In every tenth tensor: by the manifest's CRC, and against the other folder, in both directions."""
    checkpoint = open_checkpoint(mm)
    for entry in checkpoint.manifest.tensors[::10]:
        path = copy(mm, tmp_path / "bad")
        flip(path / "release" / entry.file, entry.offset + entry.nbytes // 2)
        for a, b in ((path, hf), (hf, path)):
            lines = "\n".join(compare(a, b).lines)
            assert f"{entry.file}: {entry.name}: CRC-32 is" in lines and "DIFFERS" in lines
        shutil.rmtree(path)


def test_one_byte_of_a_hugging_face_folder(hf, hf_stacked, tmp_path):
    path = copy(hf, tmp_path / "bad")
    name = "model.language_model.layers.3.mlp.experts.6.up_proj.weight"
    edit_state(path, lambda state: state[name][5, 7].neg_())
    assert "model.safetensors: " + name + ": 1 of 6144 bytes" in compare(hf, path).lines[0]
    result = compare(path, hf_stacked)
    assert not result.equal and "experts.gate_up_proj: 1 of 98304 bytes" in result.lines[0]


def test_missing_tensors_other_shapes_and_other_data_types(hf, hf_fp32, tmp_path):
    path = copy(hf, tmp_path / "a")
    edit_state(
        path,
        lambda state: [
            state.pop("lm_head.weight"),
            state.update({"model.language_model.norm.weight": torch.zeros(32)}),
        ],
    )
    with pytest.raises(UserError, match=r"1 missing: lm_head.weight; 1 of another shape"):
        compare(path, hf)
    result = compare(hf, hf_fp32)
    assert not result.equal and sum("BF16 in" in line and "F32 in" in line for line in result.lines) > 60


def test_extras_are_compared_when_both_have_them_and_named_when_not(hf, tmp_path):
    one = copy(hf, tmp_path / "one")
    extra = "model.language_model.layers.4.norm.weight"
    edit_state(one, lambda state: state.update({extra: torch.randn(8)}))
    two = copy(one, tmp_path / "two")
    assert compare(one, two).equal
    edit_state(two, lambda state: state[extra].neg_())
    assert not compare(one, two).equal
    result = compare(one, hf)
    assert result.equal and f"not compared, known extras: {extra}" in result.lines[0]


def test_inspect_says_what_a_folder_is(hf, hf_stacked, mm, tmp_path):
    text = "\n".join(describe(hf))
    assert "a Hugging Face folder" in text and "expert layout: per_expert" in text and "Glm4vMoeConverter" in text
    assert "BF16 150" in text and "model.language_model (128)" in text
    assert "expert layout: stacked_hf" in "\n".join(describe(hf_stacked))
    text = "\n".join(describe(mm))
    assert (
        "release" in text
        and "--tp 2 --pp 2 --ep 2" in text
        and "text [[2, 2]]" in text
        and "image_encoder.encoder (19)" in text
    )
    text = "\n".join(describe(to_dcp(hf, tmp_path / "dcp", expert_layout="flat", dcp_prefix="model.")))
    assert "dcp/release: a PyTorch distributed checkpoint (DCP), release" in text and "optimizer state: no" in text
    assert (
        "expert layout: flat, dcp_prefix: 'model.'" in text and "model.model.lm_head (1)" in text and "90 names" in text
    )
    (tmp_path / "dcp/release/manifest.json").unlink()
    text = "\n".join(describe(tmp_path / "dcp/release"))
    assert (
        "must be declared, e.g. of model.model.model.language_model.layers.1.mlp.experts.gate_up_proj (512, 96)" in text
    )
    with pytest.raises(UserError, match="no such folder"):
        describe(tmp_path / "nothing")


def test_inspect_reads_no_weights(mm, tmp_path):
    """A checkpoint whose data are gone (files of holes) is described all the same."""
    path = copy(mm, tmp_path / "mm")
    for file in (path / "release").glob("*/*.pt"):
        size = file.stat().st_size
        file.write_bytes(b"")
        os.truncate(file, size)
    assert json.dumps(describe(path)) == json.dumps(describe(mm)).replace(str(mm), str(path))
