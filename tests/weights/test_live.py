"""Live loading and from-scratch draws: the same tensors on every topology, strict both ways."""

from __future__ import annotations

import json

import pytest
import torch

from mm_models.config.model import ModelConfig
from mm_models.config.strict import validate
from mm_models.errors import UserError
from mm_models.layout import ParallelLayout
from mm_models.weights import live
from mm_models.weights.manifest import open_checkpoint
from mm_models.weights.model_map import build
from tests.weights.folders import copy, edit_state, model_config, state_of, to_mm

LAYOUTS = [
    {}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2, "dp": 2}, 
    {"tp": 2, "pp": 2, "ep": 2, "dp": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"ep": 2, "etp": 2, "dp": 4},
]  # fmt: skip


def place(model, layout: dict, rank: int) -> dict:
    parallel = ParallelLayout(**layout)
    return {"model": model, "layout": parallel, "coords": parallel.coords(rank)}


def empty(where: dict, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """This rank's tensors, not filled."""
    local = build(where["model"]).local(where["coords"], where["layout"], where["model"].split(where["layout"]))
    return {
        name: torch.full(one.shape, float("nan"), dtype=torch.float32 if one.tensor.hold else dtype)
        for name, one in local.items()
    }


def gathered(model, layout: dict, fill, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Global tensors put together from every rank, each filled by `fill(tensors, **place)`; copies must agree."""
    whole: dict[str, torch.Tensor] = {}
    for rank in range(ParallelLayout(**layout).world):
        where = place(model, layout, rank)
        tensors = empty(where, dtype)
        fill(tensors, **where)
        for name, one in build(model).local(where["coords"], where["layout"], model.split(where["layout"])).items():
            target = whole.setdefault(name, torch.full(one.tensor.shape, float("nan"), dtype=tensors[name].dtype))
            for region in one.regions:
                there = target[tuple(slice(s, s + n) for s, n in zip(region.start, region.extent, strict=True))]
                here = tensors[name][tuple(slice(s, s + n) for s, n in zip(region.local, region.extent, strict=True))]
                assert there.isnan().all() or torch.equal(there, here), name
                there.copy_(here)
    return whole


@pytest.fixture(scope="module")
def reference(hf):
    """The global tensors, from one process."""
    return gathered(model_config(hf), {}, lambda tensors, **where: live.load_into(tensors, hf, **where))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_source_gives_every_topology_the_same_tensors(hf, hf_stacked, tmp_path, reference, layout):
    model = model_config(hf)
    mm = to_mm(hf, tmp_path / "mm", tp=2, pp=2, ep=4)
    for source in (hf, hf_stacked, mm):
        got = gathered(model, layout, lambda tensors, source=source, **where: live.load_into(tensors, source, **where))
        assert set(got) == set(reference)
        assert all(torch.equal(got[name], reference[name]) for name in reference)


def test_only_the_needed_bytes_are_read(hf):
    model = model_config(hf)
    where = place(model, {"ep": 8, "dp": 8}, 3)
    report = live.load_into(empty(where), hf, **where)
    size = sum(t.nbytes for t in state_of(hf).values())
    experts = sum(t.nbytes for name, t in state_of(hf).items() if ".experts." in name)
    assert report.bytes_read == size - experts + experts // 8
    assert report.kind == "hf" and report.iteration is None


def test_a_half_precision_router_is_held_in_fp32_and_nothing_else_is_cast(hf, hf_fp32, tmp_path):
    path = copy(hf, tmp_path / "hf")
    edit_state(
        path, lambda state: state.update({n: t.bfloat16() for n, t in state.items() if n.endswith("mlp.gate.weight")})
    )
    where = place(model_config(hf), {}, 0)
    tensors = empty(where)
    live.load_into(tensors, path, **where)
    name = "text_decoder.decoder.layers.2.mlp.router.weight"
    assert torch.equal(tensors[name], state_of(path)["model.language_model.layers.2.mlp.gate.weight"].float())
    with pytest.raises(UserError, match=r"is BF16 in the model, F32 in the source.*and \d+ more"):
        live.load_into(empty(where), hf_fp32, **where)
    tensors = empty(where)
    live.load_into(tensors, hf_fp32, **where, cast=True)
    expected = state_of(hf_fp32)["lm_head.weight"].bfloat16()
    assert torch.equal(tensors["text_decoder.output_layer.weight"], expected)


def test_live_tensors_may_be_views_that_are_not_contiguous(hf):
    where = place(model_config(hf), {}, 0)
    tensors = empty(where)
    name = "text_decoder.decoder.layers.0.self_attention.linear_proj.weight"
    tensors[name] = tensors[name].new_empty(tensors[name].shape[::-1]).t()
    live.load_into(tensors, hf, **where)
    assert torch.equal(tensors[name], state_of(hf)["model.language_model.layers.0.self_attn.o_proj.weight"])


def test_a_model_that_is_not_the_maps_is_refused(hf):
    where = place(model_config(hf), {}, 0)
    tensors = empty(where)
    tensors["text_decoder.extra"] = tensors.pop("text_decoder.output_layer.weight")
    tensors["text_decoder.decoder.final_layernorm.weight"] = torch.zeros(32)
    words = r"1 missing: .*output_layer.weight; 1 unexpected: text_decoder.extra.*1 of another shape: .*final_layernorm.weight is \(32,\)"
    with pytest.raises(UserError, match=words):
        live.load_into(tensors, hf, **where)


def changed(model: ModelConfig, section: str, **values) -> ModelConfig:
    content = model.model_dump(exclude_none=True)
    (content["text_decoder"] if section == "text" else content["image_encoder"]["vision_encoder"]).update(values)
    return validate(ModelConfig, content, "model.json")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"add_qkv_bias": False}, "linear_qkv.bias"),
        ({"rms_norm_eps": 1e-6}, r"text_decoder.rms_norm_eps is 1e-06, .*1e-05"),
        ({"moe_router_topk": 4}, "moe_router_topk"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["hf", "mm"])
def test_a_model_json_that_disagrees_with_the_weights_is_refused(hf, tmp_path, values, words, kind):
    source = hf if kind == "hf" else to_mm(hf, tmp_path / "mm")
    where = place(changed(model_config(hf), "text", **values), {}, 0)
    with pytest.raises(UserError, match=words if kind == "mm" else next(iter(values))):
        live.load_into(empty(where), source, **where)


def test_another_layout_is_refused_with_both_and_the_command(hf, tmp_path):
    mm, model = to_mm(hf, tmp_path / "mm", pp=2, text=[1, 3], vision=[2, 0]), model_config(hf)
    checkpoint = open_checkpoint(mm)
    same = ParallelLayout(pp=2)
    live.require_same_layout(checkpoint, same, model.split(same, text_layers=[1, 3]), mm)
    with pytest.raises(
        UserError,
        match=r"text \[\[1, 3\]\] there, vision \[\[2, 0\]\], text \[\[2, 2\]\] here.*mm-convert resplit .*--llm-pp-layers '\[\[2, 2\]\]'",
    ):
        live.require_same_layout(checkpoint, same, model.split(same, text_layers=[2, 2]), mm)
    other = ParallelLayout(tp=2)
    with pytest.raises(UserError, match="tp 1 there, 2 here; pp 2 there, 1 here"):
        live.require_same_layout(checkpoint, other, model.split(other), mm)


def test_a_flipped_bit_is_refused_on_load(hf, tmp_path):
    mm, where = to_mm(hf, tmp_path / "mm"), place(model_config(hf), {}, 0)
    entry = open_checkpoint(mm).manifest.tensors[7]
    file = mm / "release" / entry.file
    data = bytearray(file.read_bytes())
    data[entry.offset + 5] ^= 4
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"{entry.name}: CRC-32 is"):
        live.load_into(empty(where), mm, **where)
    live.load_into(empty(where), mm, **where, verify=False)


# --- from scratch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_a_seed_gives_every_topology_the_same_start(hf, layout):
    model = model_config(hf)

    def draw(tensors, **where):
        live.initialise(tensors, **where, seed=7)

    one, many = gathered(model, {}, draw), gathered(model, layout, draw)
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert not any(tensor.isnan().any() for tensor in one.values())


def test_draws_are_distinct_and_of_the_stated_width(hf):
    where = place(model_config(hf), {}, 0)
    one, two = empty(where, torch.float32), empty(where, torch.float32)
    live.initialise(one, **where, seed=1)
    live.initialise(two, **where, seed=2)
    for name, tensor in one.items():
        constant = 0.0 if name.endswith("bias") else 1.0 if "norm" in name else None
        if constant is not None:
            assert (tensor == constant).all(), name
            continue
        assert not torch.equal(tensor, two[name]) and tensor.std().item() == pytest.approx(0.02, rel=0.2), name
    q, k = one["text_decoder.decoder.layers.1.self_attention.linear_qkv.weight"][:96].split([64, 32])
    assert not torch.equal(q[:32], k[:32])
    experts = one["text_decoder.decoder.layers.1.mlp.experts.gate_up_proj"]
    assert len({float(experts[e].sum()) for e in range(8)}) == 8


def test_init_method_std_is_honoured(hf):
    where = place(changed(model_config(hf), "vision", init_method_std=0.5), {}, 0)
    tensors = empty(where, torch.float32)
    live.initialise(tensors, **where, seed=1)
    assert tensors["image_encoder.encoder.patch_embed.proj.weight"].std().item() == pytest.approx(0.5, rel=0.05)


def test_a_wrong_folder_is_refused(hf, tmp_path):
    where = place(model_config(hf), {}, 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    for folder, words in (
        (tmp_path / "nothing", "no such folder"),
        (tmp_path / "other", "no latest_checkpointed_iteration.txt"),
    ):
        with pytest.raises(UserError, match=words):
            live.load_into(empty(where), folder, **where)
    (tmp_path / "other/config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match="safetensors"):
        live.load_into(empty(where), tmp_path / "other", **where)
