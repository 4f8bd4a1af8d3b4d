"""`.metadata` and `.distcp` beside stock torch: it reads ours, we read its, and nothing else gets in."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mm_models.errors import UserError
from mm_models.weights.dcp import folder, metadata, writer
from mm_models.weights.dcp.folder import open_dcp
from mm_models.weights.live import load_optimizer_shards, load_shards
from tests.harness import run
from tests.weights.dcp.kit import assert_equal, gather, stacked_state, whole_shapes
from tests.weights.dcp.test_live_shards import save
from tests.weights.folders import model_config, state_of


@pytest.fixture(scope="module")
def ours(hf, tmp_path_factory):
    """A folder written by four ranks, with moments and a step count."""
    model, path = model_config(hf), tmp_path_factory.mktemp("dcp") / "iter_0000003"
    return save(path, model, whole_shapes(model), 4, stacked_state(state_of(hf)), ep=2, moments=True)


def test_stock_torch_loads_ours(hf, ours):
    expected = stacked_state(state_of(hf))
    state = {
        "model": {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()},
        "optimizer": {
            "state": {
                n: {"exp_avg": torch.empty_like(t), "exp_avg_sq": torch.empty_like(t)} for n, t in expected.items()
            }
        },
    }
    stock.load(state, checkpoint_id=str(ours), no_dist=True)
    assert_equal(state["model"], expected)
    for name, tensor in expected.items():
        assert torch.equal(state["optimizer"]["state"][name]["exp_avg"], tensor + 1)
        assert torch.equal(state["optimizer"]["state"][name]["exp_avg_sq"], tensor * 2)


def test_stock_torch_builds_the_nested_state_dict_of_ours(hf, ours, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(ours, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_equal(state["model"], stacked_state(state_of(hf)))
    assert set(state["optimizer"]["state"]["lm_head.weight"]) == {"exp_avg", "exp_avg_sq"}


def test_stock_torch_sees_the_same_metadata(ours):
    theirs = stock.FileSystemReader(str(ours)).read_metadata()
    read = metadata.read(ours / ".metadata")
    assert set(theirs.state_dict_metadata) == set(read.tensors)
    for key, tensor in read.tensors.items():
        other = theirs.state_dict_metadata[key]
        assert tuple(other.size) == tensor.shape and other.properties.dtype == torch.float32
        assert [(tuple(c.offsets), tuple(c.sizes)) for c in other.chunks] == [
            (i.offsets, i.sizes) for i in tensor.items
        ]
        for item in tensor.items:
            info = theirs.storage_data[MetadataIndex(key, item.offsets)]
            assert (info.relative_path, info.offset, info.length) == (
                item.place.file,
                item.place.offset,
                item.place.length,
            )


def test_every_data_type_and_a_number_come_back(tmp_path):
    values = {
        str(dtype): torch.arange(12).reshape(3, 4).to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
    }
    values["number"] = torch.tensor(7.0)
    shards = {
        f"model.{n}": writer.ShardToWrite(tensor=t, start=(0,) * t.ndim, shape=tuple(t.shape))
        for n, t in values.items()
    }
    records = writer.write_rank_file(tmp_path, 0, shards)
    writer.finish(tmp_path, records, model=model_of_anything(), expert_layout="stacked_hf")
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in values.items()}}
    stock.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert_equal(state["model"], values)


def model_of_anything():
    from tests.models import tiny_glm_config

    config = tiny_glm_config().to_dict()
    from mm_models.config.family import family_of

    return family_of(config, "tiny").model(config)


def test_tensors_are_cut_into_items_along_dimension_0(tmp_path, monkeypatch):
    from mm_models.weights.dcp import chunks

    monkeypatch.setattr(chunks, "CHUNK", 100)
    tensor = torch.randn(7, 10)
    shard = writer.ShardToWrite(tensor=tensor, start=(2, 0), shape=(9, 10))
    rest = writer.ShardToWrite(tensor=torch.zeros(2, 10), start=(0, 0), shape=(9, 10))
    records = writer.write_rank_file(tmp_path, 0, {"model.a": shard}) + writer.write_rank_file(
        tmp_path, 1, {"model.a": rest}
    )
    assert [(r.offsets, r.sizes) for r in records if r.file == "__0_0.distcp"] == [
        ((2 + 2 * i, 0), (min(2, 7 - 2 * i), 10)) for i in range(4)
    ]
    writer.finish(tmp_path, records, model=model_of_anything(), expert_layout="stacked_hf")
    state = {"model": {"a": torch.empty(9, 10)}}
    stock.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(state["model"]["a"], torch.cat([torch.zeros(2, 10), tensor]))


def test_a_box_that_two_ranks_write_or_none_is_refused(tmp_path):
    one = writer.ShardToWrite(tensor=torch.randn(2, 3), start=(0, 0), shape=(4, 3))
    records = writer.write_rank_file(tmp_path, 0, {"model.a": one})
    with pytest.raises(UserError, match=r"model.a: 6 of 12 elements are covered .*__0_0.distcp"):
        writer.finish(tmp_path, records, model=model_of_anything(), expert_layout="stacked_hf")
    records += writer.write_rank_file(tmp_path, 1, {"model.a": one})
    with pytest.raises(UserError, match=r"model.a: boxes .* overlap"):
        writer.finish(tmp_path, records, model=model_of_anything(), expert_layout="stacked_hf")
    assert not (tmp_path / ".metadata").exists()


# --- files of stock torch -----------------------------------------------------------------------------------------


def stock_save(path, state):
    stock.save({"model": state}, checkpoint_id=str(path), no_dist=True)
    return path


@pytest.mark.parametrize("variable", [None, "1"])
def test_ours_loads_what_stock_torch_saved_when_the_layout_is_said(hf, tmp_path, monkeypatch, variable):
    model, layout = model_config(hf), "stacked" if variable else "stacked_hf"
    expected = stacked_state(state_of(hf), layout)
    path = stock_save(tmp_path / "release", expected)
    declared = None if variable else "stacked_hf"
    if variable:
        monkeypatch.setenv("GLM4V_DCP_3D", variable)

    def fill(shards):
        return load_shards(shards, path, model=model, expert_layout=layout, declared_layout=declared)

    got, reports = gather(whole_shapes(model, layout), 4, fill, ep=2)
    assert_equal(got, expected)
    assert sum(r.bytes_read for r in reports) == sum(t.nbytes for t in expected.values()) and reports[0].kind == "dcp"


def fsdp_save(rank, path, state):
    """Stock save of a state dict sharded like a trainer's: dimension 0, experts also on dimension 1, with AdamW state."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_fsdp", "ep"))
    dense = init_device_mesh("cpu", (4,))
    sharded = {
        name: distribute_tensor(t, mesh, [Shard(1), Shard(0)])
        if ".experts." in name
        else distribute_tensor(t, dense, [Shard(0)])
        for name, t in state.items()
    }
    moments = {name: {"exp_avg": t + 1, "exp_avg_sq": t * 2, "step": torch.tensor(3.0)} for name, t in sharded.items()}
    stock.save({"model": sharded, "optimizer": {"state": moments}, "note": "any object"}, checkpoint_id=str(path))
    dist.barrier()


def test_ours_loads_a_stock_save_of_sharded_tensors(hf, tmp_path):
    model, expected = model_config(hf), stacked_state(state_of(hf))
    run(fsdp_save, 4, tmp_path / "iter_0000003", expected, timeout=60)
    opened = open_dcp(tmp_path, 3)
    assert opened.iteration == 3 and folder.present_moments(opened) == ("exp_avg", "exp_avg_sq")
    for world, ep in ((1, 1), (3, 1), (4, 4)):
        got, _ = gather(
            whole_shapes(model),
            world,
            lambda s: load_shards(s, tmp_path, iteration=3, model=model, declared_layout="stacked_hf"),
            ep=ep,
        )
        assert_equal(got, expected)

        def fill(shards):
            moments = {name: {"exp_avg_sq": shard} for name, shard in shards.items()}
            return load_optimizer_shards(moments, tmp_path, iteration=3, model=model)

        got, _ = gather(whole_shapes(model), world, fill, ep=ep)
        assert_equal(got, {name: tensor * 2 for name, tensor in expected.items()})


# --- what is refused ----------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/should-never-be-there-mm",)


@pytest.mark.parametrize(
    "content, named",
    [
        (Evil(), r"posix\.system"),
        (Metadata(state_dict_metadata={"a": Evil()}), r"posix\.system"),
        (Metadata(state_dict_metadata={"a": BytesStorageMetadata()}, storage_data={}, planner_data=torch.nn.Linear(1, 1)), r"torch\.nn"),
        (eval, r"builtins\.eval"),
        (OrderedDict, "damaged metadata"),
    ],
    ids=["call", "inside", "module", "builtin", "another-object"],
)  # fmt: skip
def test_a_metadata_file_that_names_anything_else_is_refused(tmp_path, content, named):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=named):
        open_dcp(tmp_path)
    assert not os.path.exists("/tmp/should-never-be-there-mm")


def test_a_damaged_metadata_file_is_refused(ours, tmp_path):
    raw = (ours / ".metadata").read_bytes()
    for bad in (b"", raw[: len(raw) // 2], b"hello", raw[:-1]):
        (tmp_path / ".metadata").write_bytes(bad)
        with pytest.raises(UserError, match=r"\.metadata: damaged metadata"):
            open_dcp(tmp_path)
