"""Layer specs of every family: pure data, checked without a process group or a device; then the same modules on every provider."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp

from mm_models.components.moe import Experts
from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.layout import ModelSplit, ParallelLayout, Stage, StageSplit
from mm_models.mcore.layers import MLP, MoELayer, SelfAttention, StackedAttention, TransformerBlock, TransformerLayer
from mm_models.mcore.parallel import ColumnParallelLinear, LayerNorm, RMSNorm, RowParallelLinear
from mm_models.mcore.projector import NormMLP, WholeMerger
from mm_models.mcore.provider import Provider
from mm_models.mcore.vision import VisionTransformer
from mm_models.ops import reference
from mm_models.registry import table
from tests.harness import run
from tests.mcore.oracle import model_config
from tests.models import FAMILIES, tiny_config

PROVIDERS = ["cpu", "cuda", "npu"]

# Tower and decoder of each family: id, norm, biases, gate of the MLP; whether attention of a layer is inside windows.
TOWERS = {
    "glm4v_moe": ("glm4v_vit", RMSNorm, False, True),
    "glm4v": ("glm4v_vit", RMSNorm, False, True),
    "qwen2_vl": ("qwen2vit", LayerNorm, True, False),
    "qwen2_5_vl": ("qwen2_5_vit", RMSNorm, True, True),
}
DECODERS = {"glm4v_moe": "glm4v_moe_lm", "glm4v": "glm4v_lm", "qwen2_vl": "qwen2lm", "qwen2_5_vl": "qwen2_5_lm"}


@cache
def model_of(family: str) -> ModelConfig:
    return model_config(tiny_config(family))


def layers_of(family: str, module: str, stage: Stage, **degrees) -> dict[int, ModuleSpec]:
    model = model_of(family)
    name, config = ("vit_layer_specs", model.vision) if module == "vision" else ("llm_layer_specs", model.text)
    return table(name).get(config.model_id)(config, ParallelLayout(**degrees), stage, Provider())


def kind(layer: ModuleSpec) -> str:
    """What attention of a layer looks at, of `provider.ATTENTIONS`."""
    core = layer.submodules.self_attention.submodules.core_attention
    made = {kind: Provider().core_attention(kind) for kind in ("causal", "causal_interleaved", "frames", "windows")}
    return next(kind for kind, one in made.items() if (one.func, one.args) == (core.func, core.args))


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_layers_hold_the_expected_classes(family):
    id, norm, bias, gated = TOWERS[family]
    assert model_of(family).vision.model_id == id
    layers = layers_of(family, "vision", Stage(layers=tuple(range(4))))
    assert list(layers) == [0, 1, 2, 3]
    for layer in layers.values():
        parts = layer.submodules
        assert layer.module is TransformerLayer
        assert parts.input_layernorm.module is parts.pre_mlp_layernorm.module is norm
        assert parts.post_self_attn_layernorm is parts.post_mlp_layernorm is IdentityOp
        assert parts.self_attention.module is (SelfAttention if bias else StackedAttention) and parts.mlp.module is MLP
        if bias:
            assert parts.self_attention.params["qkv_bias"] and parts.self_attention.params["proj_bias"]
        assert (parts.mlp.params.get("bias", False), parts.mlp.params.get("gated", True)) == (bias, gated)
        assert parts.mlp.submodules.activation is (reference.swiglu if gated else reference.quick_gelu)
    expected = ["windows", "frames", "windows", "frames"] if family == "qwen2_5_vl" else ["frames"] * 4
    assert [kind(layer) for layer in layers.values()] == expected


def test_a_layer_is_whole_frame_by_its_index_in_the_model():
    for stage in ((0,), (1,), (2, 3), (3,), (1, 2)):
        found = {index: kind(layer) for index, layer in layers_of("qwen2_5_vl", "vision", Stage(layers=stage)).items()}
        assert found == {index: "frames" if index in (1, 3) else "windows" for index in stage}


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_hold_the_expected_classes(family):
    assert model_of(family).text.model_id == DECODERS[family]
    layers = layers_of(family, "text", Stage(layers=tuple(range(4))))
    assert list(layers) == [0, 1, 2, 3]
    for index, layer in layers.items():
        parts = layer.submodules
        assert layer.module is TransformerLayer
        assert parts.input_layernorm.module is parts.pre_mlp_layernorm.module is RMSNorm
        for post in (parts.post_self_attn_layernorm, parts.post_mlp_layernorm):
            assert (post.module is RMSNorm) if family == "glm4v" else (post is IdentityOp)
        assert parts.self_attention.module is SelfAttention
        assert parts.self_attention.submodules.linear_qkv is ColumnParallelLinear
        assert parts.self_attention.submodules.linear_proj is RowParallelLinear
        assert parts.self_attention.params["qkv_bias"] and not parts.self_attention.params.get("proj_bias", False)
        assert kind(layer) == ("causal_interleaved" if family == "glm4v" else "causal")
        moe = family == "glm4v_moe" and index > 0  # the first decoder layer is dense
        assert parts.mlp.module is (MoELayer if moe else MLP), index
        if moe:
            assert parts.mlp.submodules.experts is Experts
            assert parts.mlp.submodules.shared_experts.module is MLP
            assert parts.mlp.submodules.shared_experts.params["ffn"] == 96
            assert parts.mlp.params["router"]["experts"] == 8


def test_full_size_decoder_is_dense_once_then_moe():
    text = model_of("glm4v_moe").text.model_copy(update={"num_layers": 46})
    layers = table("llm_layer_specs").get("glm4v_moe_lm")(
        text, ParallelLayout(), Stage(layers=tuple(range(46))), Provider()
    )
    assert [layer.submodules.mlp.module is MoELayer for layer in layers.values()] == [False] + [True] * 45


@pytest.mark.parametrize("name", ["vision_encoders", "vit_layer_specs", "text_decoders", "llm_layer_specs"])
def test_qwens_ids_are_one_spec(name):
    first, second = ("qwen2vit", "qwen2_5_vit") if name.startswith("vi") else ("qwen2lm", "qwen2_5_lm")
    assert table(name).get(first) is table(name).get(second)


@pytest.mark.parametrize(
    "name,wrong,near", [("vit_layer_specs", "qwen2_vit", "qwen2vit"), ("llm_layer_specs", "qwen2_lm", "qwen2lm")]
)
def test_an_unknown_id_names_the_table_and_the_nearest(name, wrong, near):
    with pytest.raises(UserError, match=rf"unknown id '{wrong}' in table '{name}'; did you mean '{near}'\?"):
        table(name).get(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_stage(family):
    model, both = model_of(family), ParallelLayout()
    glm = family.startswith("glm")
    for first, last in itertools.product([True, False], repeat=2):
        stage = Stage(layers=(1,), first=first, last=last)
        tower = table("vision_encoders").get(model.vision.model_id)(model.vision, both, stage, Provider())
        assert tower.module is VisionTransformer
        assert (tower.submodules.blocks.submodules.final_layernorm is not None) is (last and glm)
        for part in ("post_conv_layernorm", "embeddings", "downsample"):
            assert (getattr(tower.submodules, part) is IdentityOp) is not glm
        assert tower.submodules.patch_embed.params["bias"] is glm
        assert tower.params["window"] == (56 if family == "qwen2_5_vl" else None)
        block = table("text_decoders").get(model.text.model_id)(model.text, both, stage, Provider())
        assert block.module is TransformerBlock
        assert (block.submodules.final_layernorm is not None) is last
    projector = table("vision_projectors").get(model.projector.model_id)(model.projector, both, Stage(), Provider())
    assert projector.module is (WholeMerger if glm else NormMLP)
    if not glm:
        assert projector.submodules.layernorm.module is TOWERS[family][1]
        assert projector.submodules.encoder.submodules.activation is reference.gelu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("module,count", [("vision", 24), ("text", 46)])
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
def test_layers_over_all_stages_are_a_partition(family, module, count, pp, vpp, share):
    flat = [int(count * part) for part in share]
    flat[-1] += count - sum(flat)
    rows = [flat[c * pp : (c + 1) * pp] for c in range(vpp)]
    split = StageSplit.parse(rows, pp=pp, vpp=vpp, num_layers=count, what="test")
    seen = []
    for chunk in range(vpp):
        for stage in range(pp):
            part = ModelSplit(vision=None, text=split).stage("text", stage, chunk)
            seen += list(layers_of(family, module, part, pp=pp, vpp=vpp))
    assert seen == list(range(count))  # each once, in flat order


@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_parallel_marks_the_decoder_alone(family):
    stage = Stage(layers=(0, 1), first=True, last=True)
    on = dict(tp=2, sequence_parallel=True)
    text = layers_of(family, "text", stage, **on)
    assert all(layer.submodules.input_layernorm.params["sequence_parallel"] for layer in text.values())
    assert all(layer.submodules.self_attention.params["sequence_parallel"] for layer in text.values())
    vision = layers_of(family, "vision", stage, **on)
    assert not any(layer.submodules.input_layernorm.params["sequence_parallel"] for layer in vision.values())
    assert not any(layer.submodules.mlp.params["sequence_parallel"] for layer in vision.values())


def shapes_case(rank: int, device: str) -> dict[str, dict[str, tuple]]:
    from mm_models.mcore.assembly import building, init_parallel, named_tensors
    from mm_models.mcore.core_config import core_config
    from mm_models.mcore.vlm_model import VLMModel

    layout, found = ParallelLayout(), {}
    init_parallel(layout, model_of("glm4v").split(layout))
    for family in FAMILIES:
        model = model_of(family)
        with building("meta", torch.bfloat16):
            config = core_config(model, layout, dtype=torch.bfloat16)
            chunk = VLMModel(
                model=model,
                layout=layout,
                split=model.split(layout),
                stage=0,
                chunk=0,
                config=config,
                provider=Provider(device),
            )
        found[family] = {name: (tuple(t.shape), str(t.dtype)) for name, t in named_tensors([chunk]).items()}
    return found


def test_every_provider_gives_the_same_names_shapes_and_dtypes():
    found = [run(shapes_case, 1, device)[0] for device in PROVIDERS]
    assert found[0] == found[1] == found[2]
    for family, tensors in found[0].items():
        assert len(tensors) > 50
        others = {name for name, (_, dtype) in tensors.items() if dtype != "torch.bfloat16"}
        assert others == {
            f"text_decoder.decoder.layers.{n}.mlp.router.{kind}"
            for n in (1, 2, 3)
            for kind in ("weight", "e_score_correction_bias")
            if family == "glm4v_moe"
        }
