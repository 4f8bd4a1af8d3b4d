"""Finding a DCP folder and what it must be to load: paths (B19), completeness (B02, B17), layouts and prefixes at load, kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from mm_models.errors import UserError
from mm_models.weights.check import compare
from mm_models.weights.dcp.folder import check_prefix, open_dcp
from mm_models.weights.live import load_shards
from tests.weights.dcp.kit import rank_shards, whole_shapes
from tests.weights.folders import copy, model_config, to_dcp
from tests.weights.test_kill import run_and_kill


@pytest.fixture(scope="module")
def dcp(hf, tmp_path_factory):
    return to_dcp(hf, tmp_path_factory.mktemp("dcp") / "tiny")


def load(folder, hf, **how):
    model = model_config(hf)
    expert_layout = how.get("expert_layout", "stacked_hf")
    return load_shards(rank_shards(whole_shapes(model, expert_layout), 1, 0), folder, model=model, **how)


def test_the_parent_and_the_folder_itself_are_accepted(dcp, hf):
    for path in (dcp, dcp / "release"):
        report = load(path, hf)
        assert (report.kind, report.folder, report.iteration) == ("dcp", dcp / "release", None)


def test_wrong_paths_are_refused_with_what_is_there(dcp, hf, tmp_path):
    """B19."""
    with pytest.raises(UserError, match=r"tiny2: no such folder. Did you mean .*tiny\?"):
        open_dcp(dcp.parent / "tiny2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError, match=r"neither .metadata nor latest_checkpointed_iteration.txt there \(found: nothing\)"
    ):
        open_dcp(tmp_path / "empty")
    bare = copy(dcp, tmp_path / "bare")
    (bare / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UserError, match=r"Did you mean .*bare/release\?"):
        open_dcp(bare)
    with pytest.raises(UserError, match=r"Did you mean .*tiny\?"):
        open_dcp(dcp.parent)
    with pytest.raises(UserError, match=r"not a DCP checkpoint"):
        open_dcp(hf)
    with pytest.raises(
        UserError, match=r"iter_0000007 is not there, but it was asked for. Complete checkpoints here: release"
    ):
        open_dcp(dcp, 7)
    (bare / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(UserError, match=r"iter_0000012 is not there, but latest_checkpointed_iteration.txt names it"):
        open_dcp(bare)
    (bare / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(UserError, match=r"says 'newest', expected 'release' or an iteration number"):
        open_dcp(bare)


def test_a_file_that_is_missing_or_cut_short_is_named(dcp, tmp_path):
    path = copy(dcp, tmp_path / "dcp")
    file = path / "release/__0_0.distcp"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(UserError, match=r"__0_0.distcp: has \d+ bytes, \d+ are needed: cut short"):
        open_dcp(path)
    file.unlink()
    with pytest.raises(UserError, match=r"__0_0.distcp: missing, .metadata names it"):
        open_dcp(path)
    (path / "release/.metadata").unlink()
    with pytest.raises(UserError, match=r"no .metadata, so it is not a complete DCP checkpoint"):
        open_dcp(path)


def test_one_ranks_experts_alone_are_refused(hf, tmp_path):
    """B02: every expert rank wrote its own shard under the same whole name; one of them is here."""
    import torch.distributed.checkpoint as stock

    state = {name: torch.zeros(shape) for name, shape in whole_shapes(model_config(hf)).items()}
    state = {n: t[:4] if ".experts." in n else t for n, t in state.items()}
    stock.save({"model": state}, checkpoint_id=str(tmp_path / "release"), no_dist=True)
    with pytest.raises(UserError, match=r"gate_up_proj is \(4, 96, 64\).*stacked_hf was expected|experts.* is \(4,"):
        load(tmp_path / "release", hf, declared_layout="stacked_hf")


@pytest.mark.parametrize("there, words", [
    ("stacked", r"experts are stacked there \(.*down_proj \(8, 48, 64\)\), stacked_hf in the model \(.*\(8, 64, 48\)\).*"
                r"mm-convert hf_to_dcp .* --expert-layout stacked_hf. Or set model.expert_layout to stacked"),
    ("flat", r"experts are flat there \(.*down_proj \(384, 64\)\), stacked_hf in the model.*mm-convert dcp_to_hf .* --expert-layout flat"),
    ("per_expert", r"experts are per_expert there \(.*experts.0.down_proj.weight \(64, 48\)\), stacked_hf in the model"),
])  # fmt: skip
def test_another_layout_than_the_models_is_refused_with_the_command(hf, tmp_path, there, words):
    with pytest.raises(UserError, match=words):
        load(to_dcp(hf, tmp_path / "dcp", expert_layout=there), hf)


def test_without_manifest_and_variable_flat_is_assumed_and_refused(hf, tmp_path, monkeypatch):
    """The fault the seeds met: a flat file and a model that is not, or the other way round."""
    monkeypatch.delenv("GLM4V_DCP_3D", raising=False)
    path = to_dcp(hf, tmp_path / "dcp", expert_layout="flat")
    (path / "release/manifest.json").unlink()
    with pytest.raises(UserError, match="experts are flat there"):
        load(path, hf)
    path = to_dcp(hf, tmp_path / "two", expert_layout="stacked")
    (path / "release/manifest.json").unlink()
    with pytest.raises(
        UserError, match=r"is \(8, 48, 64\), which is expert layout stacked; flat was expected .*Declare stacked"
    ):
        load(path, hf)
    with pytest.raises(UserError, match=r"which is expert layout stacked; stacked_hf was expected \(it was declared\)"):
        load(path, hf, declared_layout="stacked_hf")
    assert load(path, hf, expert_layout="stacked", declared_layout="stacked").tensors == 90
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    assert load(path, hf, expert_layout="stacked").tensors == 90
    with pytest.raises(UserError, match="GLM4V_DCP_3D=1 means expert layout stacked, but stacked_hf was asked for"):
        load(path, hf, declared_layout="stacked_hf")


def test_three_levels_of_prefix_are_refused_with_the_command(hf, tmp_path):
    path = to_dcp(hf, tmp_path / "dcp", dcp_prefix="model.")
    with pytest.raises(
        UserError, match=r"its keys begin with 'model.model.' .*expected 'model.'.*mm-convert dcp_to_hf"
    ):
        load(path, hf)


def test_a_manifest_of_another_folder_is_refused(hf, dcp, tmp_path):
    path = copy(dcp, tmp_path / "dcp")
    other = to_dcp(hf, tmp_path / "other", expert_layout="stacked")
    (path / "release/manifest.json").write_bytes((other / "release/manifest.json").read_bytes())
    with pytest.raises(UserError, match="do not list the same items"):
        open_dcp(path)
    (path / "release/manifest.json").write_text(json.dumps({"format": "mm-models checkpoint"}))
    with pytest.raises(UserError, match="its format is 'mm-models checkpoint', expected 'mm-models dcp'"):
        open_dcp(path)


def test_files_beside_the_checkpoint_keep_no_local_path(hf, tmp_path):
    source = copy(hf, tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/me/GLM"}))
    for name in ("tokenizer.json", "preprocessor_config.json", "chat_template.jinja"):
        (source / name).write_text("{}")
    path = to_dcp(source, tmp_path / "dcp")
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "preprocessor_config.json",
        "chat_template.jinja",
    } <= {child.name for child in path.iterdir()}
    assert "_name_or_path" not in json.loads((path / "config.json").read_text())


def test_outputs_that_are_not_ours_are_left_alone(hf, dcp, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not a DCP checkpoint folder"):
        to_dcp(hf, tmp_path / "mine")
    source = copy(hf, tmp_path / "hf")
    with pytest.raises(UserError, match="is the source itself"):
        to_dcp(source, source)
    with pytest.raises(UserError, match=r"exists already. Give another folder, or --overwrite"):
        to_dcp(hf, dcp)
    assert sorted(child.name for child in source.iterdir()) == sorted(child.name for child in hf.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_conversion_leaves_nothing_that_loads(hf, tmp_path, seed):
    out = tmp_path / "dcp"
    arguments = ["hf_to_dcp", "--hf", str(hf), "--out", str(out), "--expert-layout", "stacked"]
    if run_and_kill(arguments, random.Random(seed).uniform(0.1, 0.8)) != 0 and out.exists():
        with pytest.raises(UserError):
            open_dcp(out)
        assert not (out / "release").exists() or (out / "release/manifest.json").exists()
    done = subprocess.run([sys.executable, "-m", "mm_models.cli.convert", *arguments, "--overwrite"], check=True)
    assert done.returncode == 0 and compare(hf, out).equal and not list(out.glob("*.tmp-*"))
    back = tmp_path / "back"
    run_and_kill(
        ["dcp_to_hf", "--dcp", str(out), "--hf", str(hf), "--out", str(back)], random.Random(seed).uniform(0.1, 0.8)
    )
    assert not back.exists() or compare(hf, back).equal


def test_a_wrong_shape_names_both(hf, tmp_path):
    """B18."""
    import torch.distributed.checkpoint as stock

    shapes = whole_shapes(model_config(hf))
    values = {name: torch.zeros(shape) for name, shape in shapes.items()}
    values["model.visual.merger.proj.weight"] = torch.zeros(3, 3)
    del values["model.language_model.layers.1.mlp.gate.e_score_correction_bias"]
    values["model.odd"] = torch.zeros(1)
    stock.save({"model": values}, checkpoint_id=str(tmp_path / "release"), no_dist=True)
    words = (
        r"1 missing: .*layers.1.mlp.gate.e_score_correction_bias; 1 unexpected: model.odd.*"
        r"1 of another shape: model.visual.merger.proj.weight is \(3, 3\), expected \(64, 64\)"
    )
    with pytest.raises(UserError, match=words):
        load(tmp_path / "release", hf, declared_layout="stacked_hf")


def test_a_stock_save_without_the_outer_key_is_told_what_to_save(hf, tmp_path):
    from torch.distributed.checkpoint import save
    from transformers import Glm4vMoeForConditionalGeneration

    state = Glm4vMoeForConditionalGeneration.from_pretrained(hf, dtype=torch.float32).state_dict()
    save(dict(state), checkpoint_id=tmp_path / "bare", no_dist=True)
    names = dict.fromkeys(state)
    with pytest.raises(UserError, match=r"begin with ''.*save\(\{'model': state_dict\}"):
        check_prefix(open_dcp(tmp_path / "bare"), names, "")
    save({"model": state}, checkpoint_id=tmp_path / "named", no_dist=True)
    check_prefix(open_dcp(tmp_path / "named"), names, "")
