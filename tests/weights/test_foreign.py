"""Rank folders of the field: read with a layout from the user, dense copies of expert ranks checked for equality."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest
import torch

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import foreign, stores, verbs
from mm_models.weights.manifest import open_checkpoint
from mm_models.weights.mmfolder import container, local_key
from mm_models.weights.model_map import build
from tests.weights.folders import QUIET, assert_same_folder, loaded, model_config, to_mm


def field_folder(mm, out, *, repeated: bool = False):
    """Rewrite a checkpoint as Megatron does: no manifest, `Namespace` arguments, `_extra_state`, and, `repeated`, dense
    tensors in every expert rank's folder."""
    checkpoint = open_checkpoint(mm)
    manifest, wmap, source = checkpoint.manifest, build(checkpoint.manifest.model), loaded(mm)
    whole: dict[str, torch.Tensor] = {}
    for shard in stores.shards(wmap, manifest.layout, manifest.split):
        for name, local in shard.tensors.items():
            tensor = source[shard.folder, local.chunk][local_key(name, manifest.split)]
            target = whole.setdefault(name, torch.empty(local.tensor.shape, dtype=tensor.dtype))
            for region in local.regions:
                there, here = (
                    tuple(slice(s, s + n) for s, n in zip(at, region.extent)) for at in (region.start, region.local)
                )
                target[there] = tensor[here]
    for shard in stores.shards(wmap, manifest.layout, manifest.split, repeated=repeated):
        content = {container(manifest.layout, chunk): {} for chunk in range(manifest.layout.vpp)}
        for name, local in shard.tensors.items():
            tensor = torch.empty(local.shape, dtype=whole[name].dtype)
            for region in local.regions:
                there, here = (
                    tuple(slice(s, s + n) for s, n in zip(at, region.extent)) for at in (region.start, region.local)
                )
                tensor[here] = whole[name][there]
            content[container(manifest.layout, local.chunk)][local_key(name, manifest.split)] = tensor
        next(iter(content.values()))["text_decoder.decoder.layers.0._extra_state"] = None
        file = out / "iter_0000100" / shard.folder / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save(content | {"checkpoint_version": 3.0, "iteration": 100, "args": argparse.Namespace(lr=1.0)}, file)
    (out / "latest_checkpointed_iteration.txt").write_text("100")
    return out


def opened(path, hf, **layout):
    assert foreign.is_foreign(path)
    return foreign.open_foreign(path, model_config(hf), ParallelLayout(**layout), None, None)


@pytest.mark.parametrize(
    ("layout", "repeated"),
    [
        ({}, False), ({"tp": 2, "pp": 2}, False), ({"pp": 2, "vpp": 2}, False), ({"ep": 2}, True), ({"tp": 2, "pp": 2, "ep": 2}, True),
        ({"tp": 2, "ep": 4, "etp": 1}, False),
    ],
    ids=str,
)  # fmt: skip
def test_folders_of_the_field_are_read(hf, tmp_path, layout, repeated):
    path = field_folder(to_mm(hf, tmp_path / "mm", **layout), tmp_path / "field", repeated=repeated)
    checkpoint = opened(path, hf, **layout)
    verbs.mm_to_hf(checkpoint, hf, tmp_path / "back", options=QUIET)
    assert_same_folder(tmp_path / "back", hf)
    verbs.resplit(checkpoint, tmp_path / "ours", verbs.Target(layout=ParallelLayout(tp=2)), options=QUIET)
    assert open_checkpoint(tmp_path / "ours").manifest.iteration == 100


def test_dense_copies_that_differ_are_refused(hf, tmp_path):
    path = field_folder(to_mm(hf, tmp_path / "mm", ep=2), tmp_path / "field", repeated=True)
    file = path / "iter_0000100/mp_rank_00_001/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["text_decoder.output_layer.weight"][3, 3] += 1
    torch.save(content, file)
    with pytest.raises(
        UserError,
        match=r"mp_rank_00_000/model_optim_rng.pt: text_decoder.output_layer.weight and mp_rank_00_001/.* differ",
    ):
        verbs.resplit(opened(path, hf, ep=2), tmp_path / "out", verbs.Target(layout=ParallelLayout()), options=QUIET)


def test_a_layout_that_is_not_the_folders_is_refused(hf, tmp_path):
    path = field_folder(to_mm(hf, tmp_path / "mm", tp=2), tmp_path / "field")
    with pytest.raises(
        UserError, match=r"holds mp_rank_00, mp_rank_01; layout --pp 2 has mp_rank_00_000, mp_rank_00_001"
    ):
        opened(path, hf, pp=2)
    with pytest.raises(UserError, match=r"no key 'model0'"):
        field = field_folder(to_mm(hf, tmp_path / "mm2", pp=2), tmp_path / "field2")
        opened(field, hf, pp=2, vpp=2)
    shutil.rmtree(path / "iter_0000100/mp_rank_01")
    with pytest.raises(UserError, match="holds mp_rank_00; layout --tp 2 has mp_rank_00, mp_rank_01"):
        opened(path, hf, tp=2)


def test_the_command_asks_for_what_it_needs(hf, tmp_path, capsys):
    from mm_models.cli.convert import main

    path = field_folder(to_mm(hf, tmp_path / "mm", tp=2), tmp_path / "field")
    assert main(["resplit", "--mm", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "no manifest" in capsys.readouterr().err
    model = tmp_path / "model.json"
    model.write_text(json.dumps(model_config(hf).model_dump(exclude_none=True)))
    given = ["resplit", "--mm", str(path), "--out", str(tmp_path / "out"), "--model", str(model)]
    assert main([*given, "--source-tp", "2", "--pp", "2"]) == 0
    assert main(["inspect", str(path)]) == 0
    assert "rank folders without a manifest" in capsys.readouterr().out
