"""`resplit` carries optimizer state: every moment goes where its parameter's elements go, from any cut over DP ranks."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, replace

import pytest
import torch

from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import mmfolder, ptfile, verbs
from mm_models.weights.check import compare
from mm_models.weights.manifest import Entry, Moment, open_checkpoint, verify, write_manifest
from mm_models.weights.model_map import build
from mm_models.weights.stores import PARTS, shards
from tests.weights.folders import hf_folder, resplit, to_mm

STEP = 17
DECAY = {"weight_decay": 0.1, "lr": 1e-4}, {"weight_decay": 0.0, "lr": 1e-4}


def moment(name: str, part: str, shape) -> torch.Tensor:
    """The whole moment of a parameter: distinct values per (name, part)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}@{part}".encode()))
    return torch.randn(shape, generator=generator)


def with_optimizer(mm, *, dp: int, frozen=()) -> None:
    """Turn a release into iteration 17 with optimizer files, each local tensor cut into `dp` unequal flat ranges."""
    checkpoint = open_checkpoint(mm)
    manifest, wmap = checkpoint.manifest, build(checkpoint.manifest.model)
    tmp = mmfolder.reserve(mm / "iter_0000017")
    moments: list[Moment] = []
    for shard in shards(wmap, manifest.layout, manifest.split):
        folder = tmp / shard.folder
        folder.mkdir()
        content = torch.load(checkpoint.folder / shard.folder / mmfolder.MODEL_FILE, weights_only=True)
        torch.save(
            content
            | {"iteration": STEP, "args": {"lr": 1e-4}, "consumed_train_samples": 34, "rng_state": [torch.zeros(3)]},
            folder / mmfolder.MODEL_FILE,
        )
        moments += optimizer_files(shard, folder, dp, frozen)
    found = {entry.file: ptfile.scan(tmp / entry.file)[1] for entry in manifest.tensors}
    tensors = [{**asdict(e), "offset": found[e.file][e.container, e.key].offset} for e in manifest.tensors]
    write_manifest(tmp, replace_manifest(manifest, tensors, moments))
    mmfolder.publish(tmp)


def optimizer_files(shard, folder, dp, frozen) -> list[Moment]:
    trained = {
        n: t for n, t in shard.tensors.items() if t.tensor.kind == "param" and not n.startswith(tuple(frozen) or ("-",))
    }
    moments = []
    for rank in range(dp):
        params = {}
        for name, local in trained.items():
            size = torch.Size(local.shape).numel()
            edges = [0, *(size * (2 * i + 1) // (2 * dp + 1) for i in range(1, dp)), size]
            start, stop = edges[rank], edges[rank + 1]
            if start == stop:
                continue
            params[name] = {"range": (start, stop), "shape": local.shape}
            for part in PARTS:
                whole = torch.empty(local.shape)
                for region in local.regions:
                    cut = tuple(slice(s, s + n) for s, n in zip(region.start, region.extent))
                    whole[tuple(slice(s, s + n) for s, n in zip(region.local, region.extent))] = moment(
                        local.tensor.canonical, part, local.tensor.shape
                    )[cut]
                params[name][part] = whole.flatten()[start:stop].clone()
        if not params:
            continue
        plain = {name for name in params if len(params[name]["shape"]) > 1}
        groups = [{**DECAY[0], "params": sorted(plain)}, {**DECAY[1], "params": sorted(set(params) - plain)}]
        file = folder / mmfolder.optimizer_file(rank)
        torch.save({"params": params, "step": STEP, "groups": [g for g in groups if g["params"]]}, file)
        found = ptfile.scan(file)[1]
        moments += [
            Moment(
                name=name, part=part, file=f"{folder.name}/{file.name}", dtype="F32", shape=saved["shape"], range=saved["range"],
                offset=found["params", name, part].offset, crc32=crc(saved[part]),
            )
            for name, saved in params.items() for part in PARTS
        ]  # fmt: skip
    return moments


def crc(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())


def replace_manifest(manifest, tensors, moments):
    return replace(manifest, iteration=STEP, tensors=tuple(Entry(**row) for row in tensors), optimizer=tuple(moments))


def assert_moments(mm, frozen=()) -> None:
    """Every file of `mm` holds the moments of the elements it holds, as one data-parallel rank."""
    checkpoint = open_checkpoint(mm)
    manifest, wmap = checkpoint.manifest, build(checkpoint.manifest.model)
    assert manifest.iteration == STEP and not verify(checkpoint)
    for shard in shards(wmap, manifest.layout, manifest.split):
        trained = [
            n
            for n, t in shard.tensors.items()
            if t.tensor.kind == "param" and not n.startswith(tuple(frozen) or ("-",))
        ]
        files = list((checkpoint.folder / shard.folder).glob("optim_*"))
        assert [f.name for f in files] == (["optim_dp000.pt"] if trained else [])
        if not trained:
            continue
        content = torch.load(files[0], weights_only=True)
        assert set(content["params"]) == set(trained) and content["step"] == STEP
        grouped = {name: group["weight_decay"] for group in content["groups"] for name in group["params"]}
        for name in trained:
            local, saved = shard.tensors[name], content["params"][name]
            size = torch.Size(local.shape).numel()
            assert saved["range"] == (0, size) and saved["shape"] == local.shape
            assert grouped[name] == (0.1 if len(local.shape) > 1 else 0.0)
            for part in PARTS:
                assert saved[part].shape == (size,) and saved[part].dtype == torch.float32
                got, whole = saved[part].view(local.shape), moment(local.tensor.canonical, part, local.tensor.shape)
                for region in local.regions:
                    here = got[tuple(slice(s, s + n) for s, n in zip(region.local, region.extent))]
                    assert torch.equal(
                        here, whole[tuple(slice(s, s + n) for s, n in zip(region.start, region.extent))]
                    ), (name, part)


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"tp": 2, "pp": 2, "ep": 2}, {"pp": 4}),
        ({"pp": 2}, {"tp": 2, "ep": 4, "etp": 1}),
        ({"ep": 2, "etp": 2}, {"pp": 2, "vpp": 2, "tp": 2}),
        ({"tp": 2}, {"tp": 2}),
    ],
    ids=str,
)
def test_moments_follow_their_parameters(hf, tmp_path, source, target, dp):
    mm = to_mm(hf, tmp_path / "mm", **source)
    with_optimizer(mm, dp=dp)
    out = resplit(mm, tmp_path / "out", **target)
    assert_moments(out)
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "17"
    back = resplit(out, tmp_path / "back", **source)
    assert_moments(back)
    assert compare(mm, back).equal


def test_the_training_position_is_carried_and_random_states_are_not(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", tp=2)
    with_optimizer(mm, dp=2)
    resplit(mm, tmp_path / "out", pp=2)
    for stage in range(2):
        content = torch.load(tmp_path / f"out/iter_0000017/mp_rank_00_00{stage}/model_optim_rng.pt", weights_only=True)
        assert (
            content["iteration"] == 17 and content["args"] == {"lr": 1e-4} and content["consumed_train_samples"] == 34
        )
        assert "rng_state" not in content and content["checkpoint_version"] == 3.0


def test_a_checkpoint_with_optimizer_is_compared_with_one_without(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", tp=2)
    with_optimizer(mm, dp=2)
    result = compare(mm, hf)
    assert result.equal and f"{hf}: holds no optimizer state; weights are compared alone" in result.lines
    one, two = resplit(mm, tmp_path / "one", pp=2), resplit(mm, tmp_path / "two")
    entry = next(m for m in open_checkpoint(two).manifest.optimizer if m.part == "exp_avg_sq")
    file = two / "iter_0000017" / entry.file
    data = bytearray(file.read_bytes())
    data[entry.offset] ^= 1
    file.write_bytes(data)
    result = compare(one, two)
    assert not result.equal and any(f"{entry.name}.exp_avg_sq" in line for line in result.lines)


def test_frozen_parameters_have_no_state(hf, tmp_path):
    """The vision tower is frozen: no moments there, and a stage with nothing trained has no optimizer file."""
    mm = to_mm(hf, tmp_path / "mm", pp=2, vision=[2, 0], text=[0, 4])
    with_optimizer(mm, dp=2, frozen=["image_encoder."])
    out = resplit(mm, tmp_path / "out", tp=2, pp=4, vision=[2, 0, 0, 0], text=[0, 2, 1, 1])
    assert_moments(out, frozen=["image_encoder."])


def test_a_tied_weights_second_copy_has_its_state_where_it_stands(tmp_path):
    """The two copies' states are cut alike or differently over DP; either way one state goes to wherever a copy stands."""
    hf = hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    mm = to_mm(hf, tmp_path / "mm", pp=2)
    with_optimizer(mm, dp=2)
    one = resplit(mm, tmp_path / "one")
    assert_moments(one)
    assert_moments(resplit(one, tmp_path / "two", pp=2, tp=2))


def test_files_that_disagree_about_the_step_are_refused(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm", tp=2)
    with_optimizer(mm, dp=1)
    file = mm / "iter_0000017/mp_rank_01/optim_dp000.pt"
    content = torch.load(file, weights_only=True)
    content["step"] = 16
    torch.save(content, file)
    with pytest.raises(
        UserError, match=r"disagree about the step \(17 in mp_rank_00/optim_dp000.pt, 16 in mp_rank_01/optim_dp000.pt\)"
    ):
        resplit(mm, tmp_path / "out")


def test_a_range_that_is_missing_is_refused(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm")
    with_optimizer(mm, dp=2)
    path = mm / "iter_0000017/manifest.json"
    manifest = json.loads(path.read_text())
    name = "text_decoder.output_layer.weight"
    manifest["optimizer"] = [
        r
        for r in manifest["optimizer"]
        if not (r["name"] == name and r["part"] == "exp_avg" and r["file"].endswith("001.pt"))
    ]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"{name}.exp_avg: .*have no source"):
        resplit(mm, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


def test_an_iteration_can_be_chosen(hf, tmp_path):
    mm = to_mm(hf, tmp_path / "mm")
    with_optimizer(mm, dp=1)
    verbs.resplit(
        open_checkpoint(mm, "release"),
        tmp_path / "out",
        verbs.Target(layout=ParallelLayout(tp=2)),
        options=verbs.Options(say=lambda t: None),
    )
    assert open_checkpoint(tmp_path / "out").manifest.iteration is None
    assert not open_checkpoint(tmp_path / "out").manifest.optimizer
