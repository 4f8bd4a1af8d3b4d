"""What is sharded how: placements, groups, dtypes, prefetch lists, offload, ignored modules, refusals."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mm_models.errors import UserError
from mm_models.fsdp2 import assembly, grads, mesh, sharding
from tests.fsdp2 import kit
from tests.harness import run
from tests.models import tiny_glm_model

GATE = f"{kit.LAYERS}.1.mlp.gate"
EXPERTS = f"{kit.LAYERS}.1.mlp.experts"


def names(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def placements(tensor: torch.Tensor) -> list[tuple[str, str]]:
    return [(axis, str(p)) for axis, p in zip(tensor.device_mesh.mesh_dim_names, tensor.placements)]


def layout_case(rank: int, layout: dict, policy: sharding.Policy) -> dict:
    hf = tiny_glm_model(0)
    dirty = [torch.full((n,), float("nan")) for n in (8, 16, 64, 320, 4096)]  # fresh memory need not be zero
    del dirty
    model = kit.assemble(hf, policy=policy, **layout)
    expected = dict(hf.named_buffers())
    buffers = all(b.dtype == torch.float32 and torch.equal(b, expected[n]) for n, b in model.named_buffers())
    model(kit.mine(kit.global_batch())[0]).backward()
    found = dict(model.named_parameters())
    return {
        "groups": names(model),
        "plan": set(kit.plan(model)) | {""},
        "experts": [placements(found[f"{EXPERTS}.{key}"]) for key in ("gate_up_proj", "down_proj")],
        "shape": tuple(found[f"{EXPERTS}.gate_up_proj"].to_local().shape),
        "dense": placements(found["lm_head.weight"]),
        "dtypes": {t.dtype for t in assembly.named_tensors(model).values()} | {p.grad.dtype for p in found.values()},
        "buffers": buffers,
        "plain": type(model.model.language_model.layers[1].mlp.gate.e_score_correction_bias) is torch.Tensor,
    }


FP32 = sharding.Policy()


def test_fp32_groups():
    """Experts are groups because the plan names them; routers need no group of their own in fp32."""
    found = run(layout_case, 2, {}, FP32)[1]
    assert found["groups"] == found["plan"] | {EXPERTS.replace(".1.", f".{i}.") for i in (1, 2, 3)}
    assert found["experts"] == [[("ep_fsdp", "S(1)")]] * 2 and found["shape"] == (8, 48, 64)
    assert found["dense"] == [("shard", "S(0)")] and found["dtypes"] == {torch.float32}
    assert found["buffers"] and found["plain"]


def test_bf16_groups():
    """Routers are groups of their own, in fp32; masters and gradients are fp32 (field case B61); buffers too, on every rank (B10)."""
    found = run(layout_case, 2, {"ep_plan": False}, kit.BF16)[1]
    assert found["buffers"] and found["plain"]
    assert found["groups"] == found["plan"] | {GATE.replace(".1.", f".{i}.") for i in (1, 2, 3)}
    assert found["experts"] == [[("shard", "S(0)")]] * 2 and found["dtypes"] == {torch.float32}


def test_expert_parallel_placements():
    found = run(layout_case, 4, {"ep": 2}, kit.BF16)[3]
    assert found["experts"] == [[("ep_fsdp", "S(1)"), ("ep", "S(0)")]] * 2 and found["shape"] == (4, 48, 64)
    found = run(layout_case, 4, {"ep": 2, "shard": 2}, FP32)[0]
    assert found["experts"] == [[("ep_replicate", "R"), ("ep_fsdp", "S(1)"), ("ep", "S(0)")]] * 2
    assert found["dense"] == [("replicate", "R"), ("shard", "S(0)")] and found["shape"] == (4, 96, 64)


def named_twice_case(rank: int) -> list:
    found = []
    for extra in ([], None):
        hf = tiny_glm_model(0)
        plan = kit.plan(kit.build(hf)) + (kit.experts(kit.build(hf)) if extra is None else extra)
        model = kit.assemble(hf, ep=2, fsdp_plan=plan)
        found.append((names(model), {n: placements(p) for n, p in model.named_parameters()}))
    return found


def test_experts_named_in_both_plans_are_sharded_the_same():
    once, twice = run(named_twice_case, 2)[0]
    assert once == twice


def one_case(rank: int) -> dict:
    plain = kit.assemble(tiny_glm_model(0))
    wrapped = kit.assemble(tiny_glm_model(0), policy=kit.BF16)
    sharding.exchange_gradients(plain, False)
    return {
        "plain": names(plain),
        "dtensor": [isinstance(p, DTensor) for p in plain.parameters()],
        "bf16": names(wrapped),
    }


def test_one_process_in_fp32_is_not_wrapped():
    (found,) = run(one_case, 1)
    assert found["plain"] == set() and not any(found["dtensor"]) and "" in found["bf16"]


def dtypes_case(rank: int, policy: sharding.Policy) -> dict:
    """What reaches the modules in forward, and what comes out."""
    model = kit.assemble(tiny_glm_model(0), policy=policy)
    seen = {}

    def before(name):
        # Weights as the module sees them: after its own forward an FSDP group is sharded again.
        return lambda module, args: seen.update({name: (next(module.parameters()).dtype,)})

    def after(name):
        def hook(module, args, kwargs, output):
            cos = (kwargs.get("position_embeddings") or [torch.zeros(())])[0]
            seen[name] += (cos.dtype, output[0].dtype if isinstance(output, tuple) else output.dtype)

        return hook

    for name in ("model.visual.blocks.0.attn", f"{kit.LAYERS}.1.self_attn", GATE, EXPERTS):
        model.get_submodule(name).register_forward_pre_hook(before(name))
        model.get_submodule(name).register_forward_hook(after(name), with_kwargs=True)
    part = kit.mine(kit.global_batch())[0]
    logits = model({key: value for key, value in part.items() if key != "labels"})
    return {"seen": seen, "logits": logits.dtype, "loss": model(part).dtype}


def test_compute_dtypes():
    """fp32 cos and sin reach the tower uncast, the router computes in fp32, the rest in bf16; only the whole model's output is cast."""
    bf16, fp32 = torch.bfloat16, torch.float32
    policy = sharding.Policy(param_dtype=bf16, reduce_dtype=fp32, output_dtype=fp32)
    for found in run(dtypes_case, 2, policy):
        assert found["seen"] == {
            "model.visual.blocks.0.attn": (bf16, fp32, bf16),
            f"{kit.LAYERS}.1.self_attn": (bf16, bf16, bf16),
            GATE: (fp32, fp32, fp32),
            EXPERTS: (bf16, fp32, bf16),
        }
        assert found["logits"] == fp32 and found["loss"] == fp32
    assert run(dtypes_case, 2, kit.BF16)[0]["logits"] == bf16
    assert run(dtypes_case, 2, sharding.Policy(param_dtype=fp32))[0]["logits"] == fp32


def prefetch_case(rank: int, freeze: list[str]) -> dict:
    model = kit.assemble(
        tiny_glm_model(0), freeze=freeze, policy=sharding.Policy(forward_prefetch=2, backward_prefetch=1), ep=2
    )
    of = {module._get_fsdp_state(): name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    with torch.no_grad():
        model(kit.global_batch()[1])  # not differentiable: nothing is decided by it
    early = [state._states_to_forward_prefetch for state in of]
    model(kit.global_batch()[rank]).backward()
    return {
        "early": early,
        "forward": {of[s]: [of[n] for n in s._states_to_forward_prefetch] for s in of},
        "backward": {of[s]: [of[n] for n in s._states_to_backward_prefetch] for s in of},
    }


def test_prefetch_follows_the_order_of_execution():
    """Embedding, tower, decoder, each layer then its experts, head: on a rank with an image and on one without."""
    with_image, without = run(prefetch_case, 2, [])
    assert with_image == without and not any(with_image["early"])
    forward, backward = with_image["forward"], with_image["backward"]
    embedding, layer = "model.language_model.embed_tokens", kit.LAYERS
    assert forward[embedding] == ["model.visual", "model.visual.blocks.0"]
    assert forward["model.visual.blocks.1"] == ["model.language_model", f"{layer}.0"]
    assert forward[f"{layer}.0"] == [f"{layer}.1", EXPERTS]
    assert forward[f"{layer}.1"] == [EXPERTS, f"{layer}.2"]
    assert forward[f"{layer}.3.mlp.experts"] == ["lm_head"] and forward["lm_head"] == []
    assert backward["lm_head"] == [f"{layer}.3.mlp.experts"]
    assert backward[EXPERTS] == [f"{layer}.1"] and backward[f"{layer}.1"] == [f"{layer}.0"]
    assert backward["model.visual"] == [embedding] and backward[embedding] == []


def test_what_has_no_backward_is_not_gathered_for_it():
    for found in run(prefetch_case, 2, ["model.visual"]):
        frozen = {name for name in found["backward"] if name.startswith("model.visual")}
        assert frozen and all(found["backward"][name] == [] for name in frozen)
        assert not frozen & {name for names in found["backward"].values() for name in names}
        assert found["forward"]["model.visual"] == ["model.visual.blocks.0", "model.visual.blocks.1"]


def step_case(rank: int, options: dict, policy: sharding.Policy) -> dict:
    hf = tiny_glm_model(0)
    _, expected, norm = kit.reference(hf, kit.global_batch())
    model = kit.assemble(hf, policy=policy, **options)
    kit.backward(model, kit.mine(kit.global_batch()))
    return {
        "gradient": kit.worst(kit.relative(kit.gradients(model), expected)),
        "norm": abs(grads.norm(model) - norm) / norm,
        "plain": {name for name, p in model.named_parameters() if not isinstance(p, DTensor)},
        "devices": {str(p.device) for p in model.parameters()},
    }


def check(results: list[dict], plain=frozenset()) -> None:
    for result in results:
        assert result["gradient"][0] < 1e-4 and result["norm"] < 1e-6, result
        assert result["plain"] == set(plain)


@pytest.mark.parametrize("processes,options", [(1, {}), (2, {"ep": 2})], ids=["one", "ep2"])
def test_cpu_offload(processes, options):
    check(run(step_case, processes, options, sharding.Policy(cpu_offload=True), timeout=60))


def test_parameters_kept_after_forward():
    check(run(step_case, 2, {"ep": 2}, sharding.Policy(reshard_after_forward=False), timeout=60))


def test_ignored_modules_are_whole_everywhere_and_their_gradients_summed():
    inside = {f"model.visual.merger.{name}" for name in ("proj.weight", "post_projection_norm.weight", "post_projection_norm.bias",
              "gate_proj.weight", "up_proj.weight", "down_proj.weight")}  # fmt: skip
    policy = sharding.Policy(ignored=("model.visual.merger",))
    check(run(step_case, 2, {}, policy, timeout=60), inside)


@pytest.mark.parametrize("plan", [[], ["model"], ["model.visual", "model", "lm_head"]], ids=str)
def test_any_plan_will_do(plan):
    check(run(step_case, 2, {"fsdp_plan": plan}, FP32, timeout=60))


def refusal_case(rank: int, ep: int, ep_fsdp: int | None, names: list[str]) -> str:
    model = kit.build(tiny_glm_model(0))
    meshes = mesh.make(mesh.Sizes.of(torch.distributed.get_world_size(), ep=ep, ep_fsdp=ep_fsdp), "cpu")
    with pytest.raises(UserError) as refusal:
        sharding.shard(model, meshes, fsdp=kit.plan(model), ep=names)
    return str(refusal.value)


@pytest.mark.parametrize(
    "processes,ep,names,message",
    [
        (2, 2, [], "expert_parallel_size is 2, but ep_plan names no module"),
        (2, 2, [f"{kit.LAYERS}.1.mlp"], "ep_plan names 'model.language_model.layers.1.mlp', a MoE; expected a module of stacked"),
        (3, 3, [EXPERTS], "experts.gate_up_proj: 8 experts do not divide by 3 ranks"),
        (5, 1, [EXPERTS], r"experts.gate_up_proj \(8, 96, 64\): dimension 1 does not divide by the 5 ranks"),
    ],
)  # fmt: skip
def test_refusals(processes, ep, names, message):
    assert re.search(message, run(refusal_case, processes, ep, None, names)[0])
