"""Layer specs of GLM-4.5V: pure data, checked without a process group or a device; then the same modules on every provider."""

from __future__ import annotations

import itertools

import pytest
import torch
from megatron.core.transformer import ModuleSpec

from mm_models.components.moe import Experts
from mm_models.layout import ModelSplit, ParallelLayout, Stage, StageSplit
from mm_models.mcore.layers import MLP, MoELayer, SelfAttention, TransformerBlock, TransformerLayer
from mm_models.mcore.parallel import ColumnParallelLinear, RMSNorm, RowParallelLinear
from mm_models.mcore.projector import WholeMerger
from mm_models.mcore.provider import Provider
from mm_models.mcore.vision import VisionTransformer
from mm_models.registry import table
from tests.harness import run
from tests.mcore.oracle import model_config
from tests.models import tiny_glm_config

PROVIDERS = ["cpu", "cuda", "npu"]


@pytest.fixture(scope="module")
def model():
    return model_config(tiny_glm_config())


def specs_of(model, id: str, stage: Stage, **degrees) -> dict[int, ModuleSpec]:
    name = "vit_layer_specs" if id == "glm4v_vit" else "llm_layer_specs"
    config = model.vision if id == "glm4v_vit" else model.text
    return table(name).get(id)(config, ParallelLayout(**degrees), stage, Provider())


@pytest.mark.parametrize("id", ["glm4v_vit", "glm4v_moe_lm"])
def test_layers_hold_the_expected_classes(model, id):
    layers = specs_of(model, id, Stage(layers=tuple(range(4))))
    assert list(layers) == [0, 1, 2, 3]
    for index, layer in layers.items():
        parts = layer.submodules
        assert layer.module is TransformerLayer
        assert parts.input_layernorm.module is parts.pre_mlp_layernorm.module is RMSNorm
        assert parts.self_attention.module is SelfAttention
        assert parts.self_attention.submodules.linear_qkv is ColumnParallelLinear
        assert parts.self_attention.submodules.linear_proj is RowParallelLinear
        assert parts.self_attention.params["qkv_bias"] is (id == "glm4v_moe_lm")
        moe = id == "glm4v_moe_lm" and index > 0  # the first decoder layer is dense
        assert parts.mlp.module is (MoELayer if moe else MLP), index
        if moe:
            assert parts.mlp.submodules.experts is Experts
            assert parts.mlp.submodules.shared_experts.module is MLP
            assert parts.mlp.submodules.shared_experts.params["ffn"] == 48
            assert parts.mlp.params["router"]["experts"] == 8


def test_full_size_decoder_is_dense_once_then_moe(model):
    text = model.text.model_copy(update={"num_layers": 46})
    layers = table("llm_layer_specs").get("glm4v_moe_lm")(
        text, ParallelLayout(), Stage(layers=tuple(range(46))), Provider()
    )
    assert [layer.submodules.mlp.module is MoELayer for layer in layers.values()] == [False] + [True] * 45


def test_parts_of_a_stage(model):
    both = ParallelLayout()
    for first, last in itertools.product([True, False], repeat=2):
        stage = Stage(layers=(1,), first=first, last=last)
        tower = table("vision_encoders").get("glm4v_vit")(model.vision, both, stage, Provider())
        assert tower.module is VisionTransformer
        assert (tower.submodules.blocks.submodules.final_layernorm is not None) is last
        block = table("text_decoders").get("glm4v_moe_lm")(model.text, both, stage, Provider())
        assert block.module is TransformerBlock
        assert (block.submodules.final_layernorm is not None) is last
    projector = table("vision_projectors").get("GlmMLP")(model.projector, both, Stage(), Provider())
    assert projector.module is WholeMerger


@pytest.mark.parametrize("id,counts", [("glm4v_vit", 24), ("glm4v_moe_lm", 46)])
@pytest.mark.parametrize(
    "pp,vpp,share",
    [
        (1, 1, [1.0]),
        (2, 1, [0.3, 0.7]),
        (4, 1, [0.0, 0.5, 0.5, 0.0]),
        (2, 2, [0.2, 0.3, 0.1, 0.4]),
        (4, 2, [0.0] * 7 + [1.0]),
    ],
)
def test_layers_over_all_stages_are_a_partition(model, id, counts, pp, vpp, share):
    flat = [int(counts * part) for part in share]
    flat[-1] += counts - sum(flat)
    rows = [flat[c * pp : (c + 1) * pp] for c in range(vpp)]
    split = StageSplit.parse(rows, pp=pp, vpp=vpp, num_layers=counts, what="test")
    seen = []
    for chunk in range(vpp):
        for stage in range(pp):
            part = ModelSplit(vision=None, text=split).stage("text", stage, chunk)
            seen += list(specs_of(model, id, part, pp=pp, vpp=vpp))
    assert seen == list(range(counts))  # each once, in flat order


def test_sequence_parallel_marks_the_decoder_alone(model):
    stage = Stage(layers=(0, 1), first=True, last=True)
    on = dict(tp=2, sequence_parallel=True)
    text = specs_of(model, "glm4v_moe_lm", stage, **on)
    assert all(layer.submodules.input_layernorm.params["sequence_parallel"] for layer in text.values())
    assert all(layer.submodules.self_attention.params["sequence_parallel"] for layer in text.values())
    vision = specs_of(model, "glm4v_vit", stage, **on)
    assert not any(layer.submodules.input_layernorm.params["sequence_parallel"] for layer in vision.values())


def shapes_case(rank: int, device: str) -> dict[str, tuple]:
    from mm_models.mcore.assembly import building, init_parallel, named_tensors
    from mm_models.mcore.core_config import core_config
    from mm_models.mcore.vlm_model import VLMModel

    model, layout = model_config(tiny_glm_config()), ParallelLayout()
    split = model.split(layout)
    init_parallel(layout, split)
    with building("meta", torch.bfloat16):
        config = core_config(model, layout, dtype=torch.bfloat16)
        chunk = VLMModel(
            model=model, layout=layout, split=split, stage=0, chunk=0, config=config, provider=Provider(device)
        )
    return {name: (tuple(t.shape), str(t.dtype)) for name, t in named_tensors([chunk]).items()}


def test_every_provider_gives_the_same_names_shapes_and_dtypes():
    found = [run(shapes_case, 1, device)[0] for device in PROVIDERS]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 60
    others = {name for name, (_, dtype) in found[0].items() if dtype != "torch.bfloat16"}
    assert others == {
        f"text_decoder.decoder.layers.{n}.mlp.router.{kind}"
        for n in (1, 2, 3)
        for kind in ("weight", "e_score_correction_bias")
    }
