"""The assembled model against Hugging Face's: names, what is replaced, the components it shares with the Megatron target, buffers."""

from __future__ import annotations

import difflib
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch

from mm_models.errors import UserError
from mm_models.fsdp2 import assembly
from mm_models.ops import choose
from mm_models.registry import table
from tests.fsdp2 import kit
from tests.harness import run
from tests.models import FAMILIES, tiny_config, tiny_glm_config, tiny_glm_model, tiny_model

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[2]


def listing(model: torch.nn.Module) -> str:
    """Every module that was replaced, and every other one that holds parameters itself, by name and class."""
    lines = []
    for name, module in model.named_modules():
        if name in model.replaced:
            lines.append(f"{name or '(the model)'}: {model.replaced[name][0]} -> {model.replaced[name][1]}")
        elif dict(module.named_parameters(recurse=False)):
            lines.append(f"{name}: {type(module).__name__} kept")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("model_id", table("models").ids())
def test_what_is_replaced(model_id):
    """Fails with the difference when transformers names or divides its modules otherwise."""
    config = tiny_config(model_id, num_hidden_layers=2, depth=1).to_dict()
    found = listing(assembly.build(table("models").get(model_id), config, ops=choose("cpu")))
    expected = (GOLDEN / f"{model_id}.txt").read_text()
    difference = "\n".join(difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "found", n=0))
    assert not difference, difference


def test_a_class_that_is_gone_is_named():
    known = table("models").get("glm4v_moe")
    other = assembly.Replacement(hf_class="Glm4vMoeTextMixer", build=lambda module, *_: module)
    changed = assembly.Assembly(model_id="x", hf_class=known.hf_class, replace=(*known.replace, other))
    with pytest.raises(RuntimeError, match="no module of class Glm4vMoeTextMixer to replace"):
        assembly.build(changed, tiny_glm_config().to_dict(), ops=choose("cpu"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_hugging_faces(family, tied):
    hf = tiny_model(family, 0, tie_word_embeddings=tied)
    model = kit.build(hf)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in hf.state_dict().items()}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in hf.named_parameters()]
    ours, theirs = (dict(m.named_buffers()) for m in (model, hf))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    assert all(t.dtype == torch.float32 and t.is_meta for t in (*model.parameters(), *model.buffers()))
    expected = set(hf.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert set(assembly.named_tensors(model)) == expected
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied


def test_transposed_experts_have_transposed_shapes():
    model = kit.build(tiny_glm_model(0), expert_layout="stacked")
    moe = model.model.language_model.layers[1].mlp.experts
    assert tuple(moe.gate_up_proj.shape) == (8, 64, 96) and tuple(moe.down_proj.shape) == (8, 48, 64)
    with pytest.raises(UserError, match="unknown expert layout 'flat'"):
        kit.build(tiny_glm_model(0), expert_layout="flat")


def bases(module: torch.nn.Module) -> list[str]:
    """Component classes a module is, or inherits from."""
    ours = (base for base in type(module).__mro__ if base.__module__.startswith("mm_models.components."))
    return [f"{base.__module__.rsplit('.', 1)[-1]}.{base.__name__}" for base in ours]


def functions(*modules: str) -> set[str]:
    """Functions of `mm_models.components` that files use by name."""
    values = [value for module in modules for value in vars(sys.modules[module]).values()]
    found = {v for v in values if isinstance(v, FunctionType) and v.__module__.startswith("mm_models.components.")}
    return {f"{value.__module__.rsplit('.', 1)[-1]}.{value.__name__}" for value in found}


def ops(model: torch.nn.Module) -> set[str]:
    """Ops bound into a model's modules, through partials too."""
    values = [value for module in model.modules() for value in vars(module).values()]
    values += [inner for value in values if isinstance(value, partial) for inner in value.args]
    return {v.__name__ for v in values if isinstance(v, FunctionType) and v.__module__ == "mm_models.ops.reference"}


def components_case(rank: int, family: str) -> dict:
    from tests.mcore.cases import assemble

    hf = tiny_model(family)
    (megatron,), _, _ = assemble(hf)
    model = kit.build(hf)
    holders = [module for module in model.modules() if dict(module.named_parameters(recurse=False))]
    return {
        "classes": [{name for module in one.modules() for name in bases(module)} for one in (megatron, model)],
        "other": {type(module).__name__ for module in holders if not bases(module)},
        "functions": [
            functions(*(f"mm_models.mcore.{name}" for name in ("text", "vision", "projector", "vlm_model"))),
            functions(*(f"mm_models.fsdp2.{name}" for name in ("layers", "model", "head"))),
        ],
        "ops": [ops(megatron), ops(model)],
    }


GLM_TOWER = {"projector.GatedMerger", "vision.Downsample", "vision.InterpolatedPositions", "vision.PatchEmbed"}
COMPONENTS = {
    "glm4v_moe": GLM_TOWER | {"moe.Experts", "moe.Router", "norm.RMSNorm"},
    "glm4v": GLM_TOWER | {"norm.RMSNorm"},
    "qwen2_vl": {"norm.LayerNorm", "norm.RMSNorm", "vision.PatchEmbed"},
    "qwen2_5_vl": {"norm.RMSNorm", "vision.PatchEmbed"},
}


@pytest.mark.parametrize("family", COMPONENTS)
def test_both_targets_hold_the_same_components(family):
    """Modules, functions around them, and ops. What the other target does not have is listed here, all of it."""
    (found,) = run(components_case, 1, family, timeout=60)
    megatron, ours = found["classes"]
    assert ours == megatron == COMPONENTS[family]
    # Conv3d and LayerNorm stand inside PatchEmbed and GatedMerger; the head is a linear with the loss component in its call.
    inside = {"LayerNorm"} if "projector.GatedMerger" in ours else set()
    assert found["other"] == {"Linear", "Embedding", "Conv3d", "Head"} | inside
    megatron, ours = found["functions"]
    assert megatron - ours == {"windows.reorder"}  # Hugging Face's own tower does it by the same order
    assert ours - megatron == {"loss.chunked_cross_entropy", "loss.dynamic_chunk"}
    megatron, ours = found["ops"]
    # swiglu of two separate linears is silu_mul; swiglu is defined by it
    assert "silu_mul" in ours and "swiglu" in megatron and megatron - {"swiglu"} == ours - {"swiglu", "silu_mul"}


def test_nothing_here_loads_megatron():
    code = """
import sys, torch
from tests.fsdp2 import kit
from tests.models import tiny_glm_config
from types import SimpleNamespace
import mm_models.fsdp2.sharding, mm_models.fsdp2.grads, mm_models.fsdp2.mesh
kit.build(SimpleNamespace(config=tiny_glm_config()), device="cpu")
print(sorted(name for name in sys.modules if "megatron" in name and "specs" not in name))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_computed_and_not_left_to_chance(family):
    """Meta, then fresh memory that is dirty: every buffer equals a plain build of Hugging Face's, bit by bit (field case B11)."""
    hf = tiny_model(family)
    expected = dict(hf.named_buffers())
    for _ in range(3):
        dirty = [torch.full((n,), float("nan")) for n in (8, 16, 64, 320, 4096)]
        del dirty
        model = kit.build(hf, device="cpu")
        found = dict(model.named_buffers())
        rotary = {name for name in expected if name.endswith("inv_freq")}
        assert len(rotary) == 4 and found.keys() == expected.keys()
        for name in rotary:
            assert found[name].dtype == torch.float32 and torch.equal(found[name], expected[name]), name


def test_a_buffer_nobody_can_compute_is_refused():
    model = kit.build(tiny_glm_model(0))
    model.lm_head.register_buffer("table", torch.zeros(2), persistent=False)
    with pytest.raises(RuntimeError, match="nobody can compute the buffers \\['table'\\] of lm_head"):
        assembly.rebuild_buffers(model)


@pytest.mark.parametrize(
    "family,section,key,value,message",
    [
        ("glm4v_moe", "text_config", "attention_dropout", 0.1, "glm4v_moe_text.attention_dropout is 0.1, expected 0"),
        ("glm4v_moe", "vision_config", "attention_dropout", 0.1, "glm4v_moe_vision.attention_dropout is 0.1, expected 0"),
        ("glm4v_moe", "text_config", "hidden_act", "gelu", "glm4v_moe_text.hidden_act is 'gelu', expected 'silu'"),
        ("glm4v_moe", "vision_config", "hidden_act", "gelu", "hidden_act is 'gelu', expected 'silu'"),
        ("glm4v", "text_config", "hidden_act", "gelu", "glm4v_text.hidden_act is 'gelu', expected 'silu'"),
        ("qwen2_vl", "vision_config", "hidden_act", "silu", "qwen2_vl_vision.hidden_act is 'silu', expected 'quick_gelu'"),
        ("qwen2_5_vl", "text_config", "layer_types", ["full_attention"] * 3 + ["sliding_attention"], "use_sliding_window False"),
        ("glm4v_moe", "text_config", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
         "rope_type is 'linear', expected 'default'"),
    ],
)  # fmt: skip
def test_what_no_component_computes_is_refused(family, section, key, value, message):
    config = tiny_config(family).to_dict()
    config[section][key] = value
    with pytest.raises(UserError, match=message):
        assembly.build(table("models").get(family), config, ops=choose("cpu"))


def test_freezing():
    model = kit.build(tiny_glm_model(0))
    frozen = assembly.freeze(model, ["model.visual.blocks.0", "model.visual.merger", "lm_head.weight"])
    assert frozen == [name for name, p in model.named_parameters() if not p.requires_grad]
    assert all(name.startswith(("model.visual.blocks.0.", "model.visual.merger.", "lm_head.")) for name in frozen)
    assert len(frozen) == 7 + 6 + 1
    with pytest.raises(UserError, match="freezes every parameter"):
        assembly.freeze(model, ["model"])
