"""Checkpoint folders: names, finding the right one (field case B19), publishing, and the manifest's own checks."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest

from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout, StageSplit
from mm_models.weights import mmfolder
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import copy, to_mm


@pytest.fixture(scope="module")
def mm(hf, tmp_path_factory):
    return to_mm(hf, tmp_path_factory.mktemp("mm") / "good", tp=2, pp=2)


def test_names_of_folders():
    one, both, experts = ParallelLayout(tp=2), ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, pp=2, ep=2, etp=1)
    assert mmfolder.dense_dir(one, tp=1, pp=0) == "mp_rank_01"
    assert mmfolder.dense_dir(both, tp=1, pp=1) == "mp_rank_01_001"
    assert mmfolder.expert_dir(both, etp=1, pp=1, ep=0) == "mp_rank_01_001"
    assert mmfolder.expert_dir(experts, etp=0, pp=1, ep=1) == "expert_rank_00_001_001"
    assert mmfolder.expert_dir(ParallelLayout(ep=2), etp=0, pp=0, ep=1) == "expert_rank_00_001"
    assert mmfolder.iteration_name(100) == "iter_0000100" and mmfolder.iteration_name(None) == "release"


def test_local_names_count_from_zero_in_each_chunk():
    split = ModelSplit(vision=StageSplit(((1, 1), (0, 0))), text=StageSplit(((0, 1), (2, 1))))
    for name, key, stage, chunk in (
        ("text_decoder.decoder.layers.2.mlp.router.weight", "text_decoder.decoder.layers.1.mlp.router.weight", 0, 1),
        (
            "text_decoder.decoder.layers.3.input_layernorm.weight",
            "text_decoder.decoder.layers.0.input_layernorm.weight",
            1,
            1,
        ),
        ("image_encoder.encoder.blocks.layers.1.x", "image_encoder.encoder.blocks.layers.0.x", 1, 0),
        ("text_decoder.output_layer.weight", "text_decoder.output_layer.weight", 1, 1),
    ):
        assert mmfolder.local_key(name, split) == key
        assert mmfolder.global_key(key, split, stage=stage, chunk=chunk) == name
    with pytest.raises(UserError, match="holds 1 layers"):
        mmfolder.global_key("text_decoder.decoder.layers.1.x", split, stage=1, chunk=1)


def test_the_right_folder_is_found(mm):
    assert mmfolder.resolve(mm) == mm / "release"
    assert mmfolder.resolve(mm, "release") == mm / "release"
    assert mmfolder.resolve(mm / "release") == mm / "release"


@pytest.mark.parametrize(
    ("harm", "inside", "iteration", "words"),
    [
        (None, "goood", None, r"no such folder. Did you mean .*good\?"),
        (lambda p: (p / "empty").mkdir(), "empty", None, "empty, expected a checkpoint folder"),
        (
            lambda p: (p / "good/latest_checkpointed_iteration.txt").unlink(),
            "good",
            None,
            "holds release but no latest_checkpointed",
        ),
        (None, ".", None, r"not a checkpoint folder. Did you mean .*good\?"),
        (
            lambda p: (p / "good/config.json").write_text("{}"),
            "good",
            5,
            "iter_0000005 is not there, but it was asked for. Complete checkpoints here: release",
        ),
        (
            lambda p: (p / "good/latest_checkpointed_iteration.txt").write_text("7"),
            "good",
            None,
            "iter_0000007 is not there, but latest",
        ),
        (lambda p: (p / "good/latest_checkpointed_iteration.txt").write_text("soon"), "good", None, "says 'soon'"),
        (
            lambda p: (p / "good/release/manifest.json").unlink(),
            "good",
            None,
            "no manifest.json, so it is not a complete checkpoint",
        ),
        (
            lambda p: (p / "good/release/manifest.json").unlink(),
            "good/release",
            None,
            "holds rank folders but no manifest.json",
        ),
        (lambda p: (p / "file").write_text(""), "file", None, "a file, expected a checkpoint folder"),
    ],
)
def test_a_wrong_path_is_refused_with_what_is_there(mm, tmp_path, harm, inside, iteration, words):
    copy(mm, tmp_path / "good")
    if harm:
        harm(tmp_path)
    with pytest.raises(UserError, match=words):
        mmfolder.resolve(tmp_path / inside, iteration)


def test_a_hugging_face_folder_is_not_a_checkpoint(hf):
    with pytest.raises(UserError, match="a Hugging Face folder, expected a checkpoint"):
        mmfolder.resolve(hf)


def test_a_missing_or_short_file_is_named(mm, tmp_path):
    path = copy(mm, tmp_path / "a")
    file = path / "release/mp_rank_01_000/model_optim_rng.pt"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"mp_rank_01_000/model_optim_rng.pt: has \d+ bytes, the manifest needs"):
        open_checkpoint(path)
    file.unlink()
    with pytest.raises(UserError, match=r"mp_rank_01_000/model_optim_rng.pt: missing, the manifest names it"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=99), "manifest version 99"),
        (lambda m: m.update(format="else"), "not a manifest of this tool"),
        (lambda m: m.pop("splits"), "damaged manifest"),
        (lambda m: m.update(expert_layout="flat"), "expert layout 'flat'"),
        (lambda m: m["model"]["text_decoder"].update(hidden=3), "unknown key 'text_decoder.hidden'"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(mm, tmp_path, change, words):
    path = copy(mm, tmp_path / "a")
    manifest = json.loads((path / "release/manifest.json").read_text())
    change(manifest)
    (path / "release/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=words):
        open_checkpoint(path)


def test_publishing_replaces_and_moves_the_tracker(tmp_path):
    for text in ("one", "two"):
        tmp = mmfolder.begin(tmp_path / "run", 3)
        assert tmp.name.startswith("iter_0000003.tmp-")
        (tmp / mmfolder.MANIFEST).write_text(text)
        assert mmfolder.publish(tmp) == tmp_path / "run/iter_0000003"
    assert (tmp_path / "run/iter_0000003/manifest.json").read_text() == "two"
    assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(child.name for child in (tmp_path / "run").iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    with pytest.raises(UserError, match="exists already"):
        mmfolder.begin(tmp_path / "run", 3, overwrite=False)


def _die_inside(path, ready):
    mmfolder.begin(path, 5)
    ready.set()
    os._exit(9)


def _stay_inside(path, ready, go_on):
    mmfolder.begin(path, 5)
    ready.set()
    go_on.wait(30)


def test_leftovers_of_the_dead_are_removed_and_the_living_are_respected(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, go_on = context.Event(), context.Event()
    dead = context.Process(target=_die_inside, args=(tmp_path / "run", ready))
    dead.start()
    dead.join()
    left = [child.name for child in (tmp_path / "run").iterdir()]
    assert len(left) == 1 and left[0].startswith("iter_0000005.tmp-")
    mmfolder.abandon(mmfolder.begin(tmp_path / "run", 6))
    assert not list((tmp_path / "run").iterdir())
    ready.clear()
    living = context.Process(target=_stay_inside, args=(tmp_path / "run", ready, go_on))
    living.start()
    ready.wait(30)
    with pytest.raises(UserError, match=rf"another process \(pid {living.pid}\) is writing there now"):
        mmfolder.begin(tmp_path / "run", 6)
    go_on.set()
    living.join()
