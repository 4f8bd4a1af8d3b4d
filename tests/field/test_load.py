"""Loading: what is missing, strange or of another shape is refused by name, and no path but the right one starts a run."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.mcore.arguments import parse
from mm_models.mcore.checkpoint import check_source
from mm_models.mcore.validation import plan
from mm_models.weights import live, mmfolder, verbs
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.harness import CaseFailed
from tests.mcore.training_kit import launch_synthetic, tiny_flags
from tests.weights.folders import QUIET, copy, hf_folder, model_config, to_mm
from tests.weights.test_live import empty, place

# --- B18 ------------------------------------------------------------------------------------------------------------

LOST = {
    "a norm": "text_decoder.decoder.layers.2.input_layernorm.weight",
    "a qkv bias": "text_decoder.decoder.layers.0.self_attention.linear_qkv.bias",
    "a ViT bias": "image_encoder.encoder.patch_embed.proj.bias",
    "the projector": "image_encoder.projector.up_proj.weight",
    "the router bias": "text_decoder.decoder.layers.1.mlp.router.e_score_correction_bias",
    "experts": "text_decoder.decoder.layers.3.mlp.experts.down_proj",
    "the head": "text_decoder.output_layer.weight",
}


@pytest.fixture(scope="module")
def source(hf, tmp_path_factory):
    """A Hugging Face folder and its checkpoint of EP 2, so that experts have files of their own."""
    return hf, to_mm(hf, tmp_path_factory.mktemp("field") / "mm", ep=2)


def edit(path: Path, change) -> None:
    """Change the rows of a release's manifest."""
    file = path / "release" / mmfolder.MANIFEST
    manifest = json.loads(file.read_text())
    change(manifest["tensors"])
    file.write_text(json.dumps(manifest))


def load(hf, mm, rank: int = 0) -> None:
    where = place(model_config(hf), {"ep": 2, "dp": 2}, rank)
    live.load_into(empty(where, torch.float32), mm, **where)


def refused(capsys, hf, mm, *words: str) -> None:
    """By a run's loader, `mm_to_hf` and `resplit` alike, each with `words`; nothing is written."""
    with pytest.raises(UserError) as caught:
        load(hf, mm)
    said = [str(caught.value)]
    for command in (["mm_to_hf", "--mm", mm, "--hf", hf], ["resplit", "--mm", mm, "--tp", "2"]):
        assert main([*map(str, command), "--out", str(mm.parent / "out")]) == 2
        said.append(capsys.readouterr().err)
        assert not (mm.parent / "out").exists()
    assert all(word in text for word in words for text in said), said


@pytest.mark.parametrize("what", LOST)
def test_a_tensor_that_a_checkpoint_lacks_is_named(source, tmp_path, capsys, what):
    """B18: one tensor at a time, taken out of the manifest: training's loader, `mm_to_hf` and `resplit` stop with its name."""
    hf, mm = source
    path, name = copy(mm, tmp_path / "mm"), LOST[what]
    edit(path, lambda rows: rows.remove(next(row for row in rows if row["name"] == name)))
    refused(capsys, hf, path, "1 missing: ", name)


@pytest.mark.parametrize("what", LOST)
def test_a_tensor_taken_out_of_its_file_is_noticed(source, tmp_path, what):
    """B18: the file rewritten without the tensor, behind the manifest's back: its file is named, never read as something else."""
    hf, mm = source
    path, name = copy(mm, tmp_path / "mm"), LOST[what]
    entry = next(entry for entry in open_checkpoint(path).manifest.tensors if entry.name == name)
    content = torch.load(path / "release" / entry.file, weights_only=True)
    assert content["model"].pop(entry.key) is not None
    torch.save(content, path / "release" / entry.file)
    with pytest.raises(UserError, match=entry.file):
        load(hf, path)


def test_an_unknown_tensor_and_another_shape_are_named(source, tmp_path, capsys):
    """B18: a tensor too many; and a shape, with both shapes."""
    hf, mm = source
    path = copy(mm, tmp_path / "more")
    edit(path, lambda rows: rows.append(rows[0] | {"name": "text_decoder.decoder.layers.0.ghost.weight"}))
    refused(capsys, hf, path, "1 unexpected: text_decoder.decoder.layers.0.ghost.weight")
    path = copy(mm, tmp_path / "shape")
    name = LOST["the projector"]
    edit(path, lambda rows: next(row for row in rows if row["name"] == name).update(shape=[32, 160]))
    refused(capsys, hf, path, f"{name} in mp_rank_00 is (32, 160), expected (80, 64)")


def test_extra_state_alone_is_no_fault(source, tmp_path):
    """B18: `_extra_state` keys of the field's own files are let through; any other key is not."""
    from tests.weights.test_foreign import field_folder, opened

    hf, mm = source
    path = field_folder(mm, tmp_path / "field")
    target = verbs.Target(layout=ParallelLayout(tp=2))
    verbs.resplit(opened(path, hf, ep=2), tmp_path / "ours", target, options=QUIET)
    assert compare(hf, tmp_path / "ours").equal
    file = path / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    assert any(key.endswith("_extra_state") for key in content["model"]) and isinstance(
        content["args"], argparse.Namespace
    )
    content["model"]["text_decoder.decoder.layers.0.ghost.weight"] = torch.zeros(3)
    torch.save(content, file)
    with pytest.raises(UserError, match=r"1 unexpected: text_decoder\.decoder\.layers\.0\.ghost\.weight"):
        verbs.resplit(opened(path, hf, ep=2), tmp_path / "theirs", target, options=QUIET)
    assert not (tmp_path / "theirs").exists()


# --- B17 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints of a run, iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("field") / "run"
    often = ["--save", str(folder / "ck"), "--save-interval", "1", "--exit-interval", "2"]
    launch_synthetic(1, [*tiny_flags(folder, steps=3), "--from-scratch", *often], folder / "m.jsonl")
    return folder / "ck"


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "optim_dp000.pt"])
def test_a_file_of_the_newest_checkpoint_is_gone(saved, tmp_path, name):
    """B17: refused with the file, before a process starts; the checkpoint before it still resumes when asked for."""
    shutil.copytree(saved, tmp_path / "ck")
    (tmp_path / "ck/iter_0000002/mp_rank_00" / name).unlink()
    argv = [*tiny_flags(tmp_path, steps=3), "--load", str(tmp_path / "ck")]
    with pytest.raises(UserError, match=rf"iter_0000002/mp_rank_00/{name}: missing"):
        check_source(plan(parse(argv), 1))
    assert [r["iteration"] for r in launch_synthetic(1, [*argv, "--ckpt-step", "1"], tmp_path / "m.jsonl")] == [2, 3]


def test_an_unfinished_folder_is_no_checkpoint(saved, tmp_path):
    """B17: the tracker names a step whose folder was never finished, or a half-written folder lies beside the good ones."""
    shutil.copytree(saved, tmp_path / "ck")
    shutil.copytree(tmp_path / "ck/iter_0000002", tmp_path / "ck/iter_0000003.tmp-999999")
    argv = [*tiny_flags(tmp_path, steps=3), "--load", str(tmp_path / "ck")]
    assert check_source(plan(parse(argv), 1)).checkpoint.manifest.iteration == 2
    (tmp_path / "ck/latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(
        UserError, match=r"iter_0000003 is not there.*Complete checkpoints here: iter_0000001, iter_0000002"
    ):
        check_source(plan(parse(argv), 1))
    (tmp_path / "ck/iter_0000002/manifest.json").unlink()
    with pytest.raises(UserError, match=r"iter_0000002: no manifest\.json, so it is not a complete checkpoint"):
        check_source(plan(parse([*argv, "--ckpt-step", "2"]), 1))


# --- B19 ------------------------------------------------------------------------------------------------------------


def test_no_wrong_path_takes_a_step(saved, hf, tmp_path):
    """B19: typo, empty folder, no tracker, the parent, an absent step, a folder of something else: an error with the path, no step."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    shutil.copytree(saved, tmp_path / "bare")
    (tmp_path / "bare/latest_checkpointed_iteration.txt").unlink()
    wrong = (saved.with_name("kc"), tmp_path / "empty", tmp_path / "other", tmp_path / "bare", saved.parent)
    cases = dict.fromkeys(wrong, ()) | {saved: ("--ckpt-step", "7"), hf: ("--ckpt-step", "1")}
    for path, more in cases.items():
        argv = [*tiny_flags(tmp_path / "run", steps=3), "--load", str(path), *more]
        with pytest.raises(UserError) as caught:
            check_source(plan(parse(argv), 1))
        assert str(path) in str(caught.value)
    with pytest.raises(CaseFailed, match="kc"):
        launch_synthetic(
            1, [*tiny_flags(tmp_path / "run", steps=3), "--load", str(saved.with_name("kc"))], tmp_path / "m.jsonl"
        )
    assert not (tmp_path / "m.jsonl").exists()
    with pytest.raises(UserError, match="--from-scratch"):
        plan(parse(tiny_flags(tmp_path / "run", steps=3)), 1)


def test_a_damaged_hugging_face_folder_starts_no_run(tmp_path):
    """B19, B18: `--load` of a Hugging Face folder with a shard missing, cut short, or with one tensor gone: named."""
    path = hf_folder(tmp_path / "hf", dtype=torch.float32, shard_size="500KB")
    where = place(model_config(path), {}, 0)
    shard = sorted(path.glob("*.safetensors"))[1]
    before = shard.read_bytes()
    shard.write_bytes(before[:-8])
    with pytest.raises(UserError, match=f"{shard.name}.*cut short"):
        live.load_into(empty(where, torch.float32), path, **where)
    shard.unlink()
    with pytest.raises(UserError, match=f"missing: {shard.name}"):
        live.load_into(empty(where, torch.float32), path, **where)
    assert main(["hf_to_mm", "--hf", str(path), "--out", str(tmp_path / "mm")]) == 2 and not (tmp_path / "mm").exists()
