"""Router and experts against Hugging Face's block, the grouped path against the loop, and idle experts."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeTextMoE

from mm_models.components.moe import Experts, Router, routed_experts, through_experts
from mm_models.errors import UserError
from mm_models.ops.reference import grouped_matmul, grouped_matmul_loop
from tests.models import fill_distinct, tiny_glm_config


def block(dtype, **overrides):
    """Hugging Face's MoE block and ours with its weights."""
    config = tiny_glm_config(hidden_size=128, n_routed_experts=16, num_experts_per_tok=4, **overrides).text_config
    config._experts_implementation = "grouped_mm"
    hf = Glm4vMoeTextMoE(config)
    fill_distinct(hf, 3)
    for name, parameter in hf.named_parameters():
        if "gate.weight" not in name:
            parameter.data = parameter.data.to(dtype)
    router = Router(
        hidden=128,
        experts=16,
        top_k=4,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    router.load_state_dict(hf.gate.state_dict())
    return hf, router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "overrides", [{}, {"n_group": 4, "topk_group": 2}, {"norm_topk_prob": False, "routed_scaling_factor": 1.7}], ids=str
)
def test_routed_experts_equal_hugging_face(dtype, overrides):
    hf, router = block(dtype, **overrides)
    experts = Experts(experts=16, hidden=128, intermediate=48, dtype=dtype)
    experts.load_state_dict(hf.experts.state_dict())
    torch.manual_seed(0)
    x = torch.randn(1, 60, 128, dtype=dtype)
    with torch.no_grad():
        _, weights, indices = hf.gate(x.view(-1, 128))
        ours_weights, ours_indices = router(x.view(-1, 128))
        assert torch.equal(indices, ours_indices) and torch.equal(weights, ours_weights)
        routed, _ = routed_experts(x.view(-1, 128), router, experts)
        assert torch.equal(routed, hf.experts(x.view(-1, 128), indices, weights).view(-1, 128))
        assert torch.equal(routed.view(x.shape) + hf.shared_experts(x), hf(x))


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_grouped_equals_loop_with_gradients_and_idle_experts(dtype, bound):
    """128 experts, top-8, most of them idle: forward and every gradient."""
    torch.manual_seed(0)
    router = Router(hidden=64, experts=128, top_k=8)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias[100:] = -5.0
    results = []
    for matmul in (grouped_matmul, grouped_matmul_loop):
        torch.manual_seed(1)
        experts = Experts(experts=128, hidden=64, intermediate=32, matmul=matmul, dtype=dtype)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x = torch.randn(30, 64, dtype=dtype, requires_grad=True)
        router.weight.grad = None
        out, chosen = routed_experts(x, router, experts)
        (out.float() * torch.randn(out.shape)).sum().backward()
        assert len(chosen.unique()) < 101
        results.append([out.detach(), x.grad, router.weight.grad.clone(), *(p.grad for p in experts.parameters())])
    for grouped, loop in zip(*results):
        assert (grouped - loop).float().norm() <= bound * loop.float().norm()
    idle = set(range(128)) - set(chosen.unique().tolist())
    assert all(not results[0][3][e].any() for e in idle)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("matmul", [grouped_matmul, grouped_matmul_loop])
def test_transposed_experts(dtype, bound, matmul):
    """(E, in, out) gives what (E, out, in) gives, forward and every gradient."""
    results = []
    for layout in ("stacked_hf", "stacked"):
        torch.manual_seed(2)
        experts = Experts(experts=6, hidden=32, intermediate=16, layout=layout, matmul=matmul, dtype=dtype)
        for parameter in experts.parameters():
            values = torch.randn(parameter.shape if layout == "stacked_hf" else parameter.transpose(1, 2).shape)
            parameter.data.copy_(values if layout == "stacked_hf" else values.transpose(1, 2))
        rows = torch.randn(20, 32, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
        out = experts(rows, torch.tensor([3, 0, 7, 1, 9, 0]))
        out.float().square().sum().backward()
        grads = [p.grad if layout == "stacked_hf" else p.grad.transpose(1, 2) for p in experts.parameters()]
        results.append([out.detach(), rows.grad, *grads])
    for plain, transposed in zip(*results):
        assert (plain - transposed).float().norm() <= bound * plain.float().norm()


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="unknown expert layout 'stackd'; did you mean 'stacked'"):
        Experts(experts=2, hidden=8, intermediate=8, layout="stackd")
    with pytest.raises(UserError, match="unknown dispatcher 'gather'"):
        through_experts(hidden=None, indices=None, weights=None, experts=None, num_experts=2, dispatch="gather")


def test_no_token_at_all():
    router, experts = Router(hidden=8, experts=4, top_k=2), Experts(experts=4, hidden=8, intermediate=8)
    for parameter in (*router.parameters(), *experts.parameters()):
        torch.nn.init.normal_(parameter)
    out, chosen = routed_experts(torch.zeros(0, 8, requires_grad=True), router, experts)
    assert out.shape == (0, 8) and chosen.shape == (0, 2)
    out.sum().backward()
    assert not experts.down_proj.grad.any()


def test_replayed_choice_is_used():
    router = Router(hidden=8, experts=4, top_k=2)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(5, 8)
    weights, chosen = router(x)
    other = (chosen + 1) % 4
    replayed, same = router(x, other)
    assert torch.equal(same, other) and not torch.equal(replayed, weights)
