"""Hugging Face folders: what is read, and everything about them that is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_models.errors import UserError
from mm_models.weights import hffolder
from tests.weights.folders import copy, state_of


def test_headers_are_what_safetensors_reads(hf_stacked):
    folder, state = hffolder.open_folder(hf_stacked), state_of(hf_stacked)
    assert len(folder.headers) > 1 and folder.index is not None
    assert set(folder.tensors) == set(state)
    for name, stored in folder.tensors.items():
        raw = stored.file.read_bytes()[stored.offset : stored.offset + stored.nbytes]
        assert raw == state[name].contiguous().view(torch.uint8).numpy().tobytes(), name


def test_a_header_written_by_hand_is_read_by_safetensors(tmp_path):
    file = tmp_path / "a.safetensors"
    stored = hffolder.skeleton(
        file, hffolder.make_header([("x", "BF16", (2, 3)), ("y", "F32", (5,)), ("z", "I64", ())], {"format": "pt"})
    )
    assert [(t.name, t.dtype, t.shape) for t in stored] == [("x", "BF16", (2, 3)), ("y", "F32", (5,)), ("z", "I64", ())]
    loaded = load_file(file)
    assert loaded["x"].shape == (2, 3) and loaded["y"].dtype == torch.float32 and loaded["z"].shape == ()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "not valid JSON"),
        (lambda p: sorted(p.glob("*.safetensors"))[1].unlink(), r"missing: model-00002-of-"),
        (lambda p: [f.unlink() for f in p.glob("*.safetensors")], "missing"),
        (
            lambda p: ((p / hffolder.INDEX).unlink(), sorted(p.glob("*.safetensors"))[0].unlink()),
            r"shards \[1\] of \d+ are missing",
        ),
        (
            lambda p: save_file({"a": torch.zeros(1)}, p / "model.safetensors"),
            "both model.safetensors.index.json and model.safetensors",
        ),
        (lambda p: _cut(sorted(p.glob("*.safetensors"))[0]), "cut short"),
        (lambda p: _double(p), "is in both"),
        (lambda p: _index(p, lambda m: m.pop("lm_head.weight")), "does not list lm_head.weight"),
        (lambda p: _index(p, lambda m: m.update({"ghost": next(iter(m.values()))})), "says 'ghost' is in"),
        (lambda p: _index(p, lambda m: m.update({"lm_head.weight": sorted(m.values())[0]})), "'lm_head.weight' is in"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(hf_stacked, tmp_path, harm, words):
    path = copy(hf_stacked, tmp_path / "hf")
    harm(path)
    with pytest.raises(UserError, match=words):
        hffolder.open_folder(path)


def test_a_folder_that_is_not_one(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        hffolder.open_folder(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        hffolder.open_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(UserError, match="not a safetensors file"):
        hffolder.open_folder(tmp_path)


def _cut(file):
    file.write_bytes(file.read_bytes()[:-10])


def _double(path):
    one, two = sorted(path.glob("*.safetensors"))[:2]
    state = load_file(two) | {name: tensor for name, tensor in list(load_file(one).items())[:1]}
    save_file(state, two, {"format": "pt"})


def _index(path, change):
    index = json.loads((path / hffolder.INDEX).read_text())
    change(index["weight_map"])
    (path / hffolder.INDEX).write_text(json.dumps(index))
