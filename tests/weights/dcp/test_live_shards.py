"""Boxes of a sharded model from every source: the same values on every sharding, only the bytes of the boxes read, strict."""

from __future__ import annotations

import pytest
import torch

from mm_models.errors import UserError
from mm_models.weights import live
from mm_models.weights.dcp import writer
from mm_models.weights.live import LiveShard, initialise_shards, load_optimizer_shards, load_shards
from tests.weights.dcp.kit import assert_equal, gather, rank_shards, stacked_state, whole_shapes
from tests.weights.folders import copy, edit_state, hf_folder, model_config, state_of, to_mm

SHARDINGS = [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (3, 1)]


def save(folder, model, shapes, world, values, *, ep=1, expert_layout="stacked_hf", moments=False, **finish):
    """A DCP folder written by `world` ranks from whole tensors."""
    folder.mkdir(parents=True)
    records = []
    for rank in range(world):
        shards = {}
        for name, shard in rank_shards(shapes, world, rank, ep=ep).items():
            box = tuple(slice(s, s + n) for s, n in zip(shard.start, shard.tensor.shape))
            piece = values[name][box]
            parts = {writer.weight_key(name): piece}
            if moments:
                parts |= {
                    writer.optimizer_key(name, "exp_avg"): piece + 1,
                    writer.optimizer_key(name, "exp_avg_sq"): piece * 2,
                }
            shards |= {
                key: writer.ShardToWrite(tensor=part, start=shard.start, shape=shard.shape)
                for key, part in parts.items()
            }
        records += writer.write_rank_file(folder, rank, shards)
    writer.finish(folder, records, model=model, expert_layout=expert_layout, iteration=3, **finish)
    return folder


@pytest.mark.parametrize("expert_layout", ["stacked_hf", "stacked"])
@pytest.mark.parametrize("world, ep", SHARDINGS)
def test_every_source_gives_every_sharding_the_same_tensors(hf, hf_stacked, tmp_path, world, ep, expert_layout):
    model = model_config(hf)
    shapes, expected = whole_shapes(model, expert_layout), stacked_state(state_of(hf), expert_layout)
    mm = to_mm(hf, tmp_path / "mm", tp=2, pp=2, ep=4, etp=1)
    dcp = save(tmp_path / "dcp", model, shapes, 4, expected, ep=2, expert_layout=expert_layout)
    for source in (hf, hf_stacked, mm, dcp):

        def fill(shards, source=source):
            return load_shards(shards, source, model=model, expert_layout=expert_layout)

        got, reports = gather(shapes, world, fill, ep=ep)
        assert_equal(got, expected)
        sizes = {hf: 2, hf_stacked: 2, mm: 2, dcp: 4}
        experts = sum(t.numel() for n, t in expected.items())
        fp32 = sum(t.numel() for n, t in expected.items() if ".mlp.gate." in n)
        assert sum(r.bytes_read for r in reports) == experts * sizes[source] + fp32 * (4 - sizes[source])
        assert {r.tensors for r in reports} == {len(shapes)}


@pytest.mark.parametrize("expert_layout", ["stacked_hf", "stacked"])
def test_optimizer_moments_come_back_on_another_sharding(hf, tmp_path, expert_layout):
    model = model_config(hf)
    shapes, expected = whole_shapes(model, expert_layout), stacked_state(state_of(hf), expert_layout)
    dcp = save(tmp_path / "dcp", model, shapes, 4, expected, ep=4, expert_layout=expert_layout, moments=True)
    for world, ep in ((1, 1), (4, 2), (3, 1)):

        def fill(shards):
            moments = {name: {"exp_avg": shard} for name, shard in shards.items()}
            return load_optimizer_shards(moments, dcp, model=model, expert_layout=expert_layout)

        got, _ = gather(shapes, world, fill, ep=ep)
        assert_equal(got, {name: tensor + 1 for name, tensor in expected.items()})
    shards = rank_shards(shapes, 1, 0)
    del shards["lm_head.weight"]
    with pytest.raises(UserError, match=r"exp_avg: 1 unexpected: lm_head.weight"):
        load_optimizer_shards(
            {n: {"exp_avg": s} for n, s in shards.items()}, dcp, model=model, expert_layout=expert_layout
        )


def test_tensors_on_strides_are_staged_and_empty_boxes_are_passed_over(hf):
    model = model_config(hf)
    shapes, expected = whole_shapes(model), stacked_state(state_of(hf))
    shards = rank_shards(shapes, 1, 0)
    name = "model.language_model.layers.0.self_attn.o_proj.weight"
    turned = torch.full(shapes[name][::-1], float("nan")).t()
    shards[name] = LiveShard(tensor=turned, start=(0, 0), shape=shapes[name])
    norm = "model.language_model.norm.weight"
    shards[norm] = LiveShard(tensor=torch.empty(0), start=shapes[norm], shape=shapes[norm])
    load_shards(shards, hf, model=model)
    assert torch.equal(turned, expected[name])


def test_a_draw_is_the_megatron_targets_draw_on_every_sharding(hf):
    model = model_config(hf)
    reference = {}
    for layout in ("stacked_hf", "stacked"):
        shapes = whole_shapes(model, layout)
        for world, ep in ((1, 1), (4, 2)):
            got, _ = gather(
                shapes,
                world,
                lambda s, layout=layout: initialise_shards(s, model=model, seed=5, expert_layout=layout),
                ep=ep,
            )
            if layout == "stacked":
                got = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in got.items()}
            if not reference:
                reference = got
            assert_equal(got, reference)
    from tests.weights.test_live import gathered

    mm = gathered(model, {}, lambda tensors, **where: live.initialise(tensors, seed=5, **where), dtype=torch.float32)
    name = "decoder.layers.2.mlp.experts.gate_up_proj"
    assert torch.equal(mm["text_decoder." + name], reference["model.language_model.layers.2.mlp.experts.gate_up_proj"])
    assert reference["lm_head.weight"].std() > 0.01


def test_missing_unexpected_and_misshapen_tensors_are_named(hf, tmp_path):
    model = model_config(hf)
    shards = rank_shards(whole_shapes(model), 1, 0)
    path = copy(hf, tmp_path / "hf")
    edit_state(
        path, lambda state: (state.pop("model.visual.blocks.0.norm1.weight"), state.update({"extra": torch.zeros(3)}))
    )
    with pytest.raises(UserError, match=r"1 missing: model.visual.blocks.0.norm1.weight; 1 unexpected: extra"):
        load_shards(shards, path, model=model)
    with pytest.raises(
        UserError, match=r"allow_missing \(model.visual.merger.\*\) does not cover model.visual.blocks.0.norm1.weight"
    ):
        load_shards(shards, path, model=model, ignore_unexpected=["extra"], allow_missing=["model.visual.merger.*"])
    report = load_shards(
        shards, path, model=model, ignore_unexpected=["extra"], allow_missing=["model.visual.blocks.{*}.norm1.weight"]
    )
    assert report.unfilled == ("model.visual.blocks.0.norm1.weight",) and report.ignored == ("extra",)
    assert shards["model.visual.blocks.0.norm1.weight"].tensor.isnan().all()
    assert not any(s.tensor.isnan().any() for n, s in shards.items() if n not in report.unfilled)
    initialise_shards({n: shards[n] for n in report.unfilled}, model=model, seed=1, complete=False)
    assert torch.equal(shards["model.visual.blocks.0.norm1.weight"].tensor, torch.ones(64))


def test_a_missing_expert_leaves_the_whole_stack_unfilled(hf, tmp_path):
    model = model_config(hf)
    path = copy(hf, tmp_path / "hf")
    edit_state(path, lambda state: state.pop("model.language_model.layers.2.mlp.experts.5.up_proj.weight"))
    for rank in range(4):
        shards = rank_shards(whole_shapes(model), 4, rank, ep=4)
        with pytest.raises(UserError, match=r"missing: .*layers.2.mlp.experts.5.up_proj.weight"):
            load_shards(shards, path, model=model)
        report = load_shards(shards, path, model=model, allow_missing=["*.experts.*"])
        assert report.unfilled == ("model.language_model.layers.2.mlp.experts.gate_up_proj",)


def test_a_data_type_is_widened_and_never_narrowed(hf, hf_fp32):
    model = model_config(hf)
    shards = rank_shards(whole_shapes(model), 1, 0, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"is BF16 in the model, F32 in the source"):
        load_shards(shards, hf_fp32, model=model)


def test_the_kind_asked_for_is_the_kind_loaded(hf, tmp_path):
    model = model_config(hf)
    shapes = whole_shapes(model)
    dcp = save(tmp_path / "dcp", model, shapes, 1, stacked_state(state_of(hf)))
    with pytest.raises(UserError, match="a Hugging Face folder, but load_format is dcp"):
        load_shards(rank_shards(shapes, 1, 0), hf, model=model, load_format="dcp")
    with pytest.raises(UserError, match="a DCP checkpoint, but load_format is hf"):
        load_shards(rank_shards(shapes, 1, 0), dcp, model=model, load_format="hf")
    other = model_config(hf_folder(tmp_path / "other", num_hidden_layers=5))
    with pytest.raises(UserError, match=r"holds another model than model.json: \d+ missing"):
        load_shards(rank_shards(whole_shapes(other), 1, 0), dcp, model=other)
