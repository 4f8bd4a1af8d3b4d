"""One process: logits and loss equal to Hugging Face's bit by bit, gradients within rounding, on odd batches and configurations."""

from __future__ import annotations

import pytest
import torch

from mm_models.errors import UserError
from mm_models.ops.reference import grouped_matmul_loop
from tests.fsdp2 import kit
from tests.harness import run
from tests.mcore.batches import batch, hf_sum_loss
from tests.models import FAMILIES, tiny_glm_model, tiny_model

BATCHES = {
    "one image": dict(images=[[(4, 4)]]),
    "two images": dict(images=[[(4, 6), (2, 8)]], length=48),
    "text only": dict(images=[[]]),
    "two samples": dict(images=[[(4, 4)], [(6, 4), (2, 2)]], length=48),
    "image beside text": dict(images=[[], [(4, 4)]]),
    "padded": dict(images=[[(4, 4)], [(4, 6)]], length=48),
    "ragged windows": dict(images=[[(6, 10)], [(4, 4), (2, 6)]], length=56),
}
CONFIGS = {
    "plain": {},
    "groups": {"n_group": 4, "topk_group": 2},
    "unnormalised": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "tied": {"tie_word_embeddings": True},
    "no-qkv-bias": {"attention_bias": False},
    "full-rotary": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1234.5,
            "partial_rotary_factor": 1.0,
            "mrope_section": [2, 3, 3],
        },
    },
    "eps": {"rms_norm_eps": 1e-3, "vision_rms_norm_eps": 1e-4, "first_k_dense_replace": 2},
}


def data(kind: str) -> dict:
    made = batch(1, **BATCHES[kind])
    if kind == "padded":
        made["attention_mask"][1, -7:] = 0
        made["labels"][1, -7:] = -100
    return made


@pytest.mark.parametrize("kind", BATCHES, ids=lambda kind: kind.replace(" ", "-"))
@pytest.mark.parametrize("family", FAMILIES)
def test_batches(family, kind):
    compare(tiny_model(family), data(kind))


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name):
    compare(tiny_glm_model(0, **CONFIGS[name]), data("padded"))


def compare(hf: torch.nn.Module, part: dict) -> None:
    model = kit.plain(hf)
    logits, loss = hf_sum_loss(hf, part)
    assert torch.equal(model({k: v for k, v in part.items() if k != "labels"}), logits)
    ours = model(part)
    assert torch.equal(ours, loss) and ours.dtype == torch.float32
    loss.backward()
    ours.backward()
    theirs = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in hf.named_parameters()}
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    error, name = kit.worst(kit.relative(found, theirs))
    assert error < 1e-5, (name, error)


def bf16_case(rank: int, family: str, kind: str, overrides: dict, options: dict) -> tuple[bool, float]:
    """fp32 masters computing in bf16 on a mesh of one, against Hugging Face in bf16."""
    part, hf = data(kind), tiny_model(family, 0, torch.bfloat16, **overrides)
    model = kit.assemble(tiny_model(family, 0, **overrides), policy=kit.BF16, **options)
    with torch.no_grad():
        expected, loss = hf_sum_loss(hf, part)
        got = model({k: v for k, v in part.items() if k != "labels"})
        same = torch.equal(got, expected) and torch.equal(model(part), loss)
    return same, ((got.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("kind,config", [("two samples", "plain"), ("padded", "groups"), ("text only", "tied")])
def test_bf16(kind, config):
    ((same, _),) = run(bf16_case, 1, "glm4v_moe", kind, CONFIGS[config], {}, timeout=60)
    assert same


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "glm4v_moe"])
@pytest.mark.parametrize(
    "kind", [name if name == "ragged windows" else pytest.param(name, marks=pytest.mark.slow) for name in BATCHES]
)
def test_families_in_bf16(family, kind):
    ((same, _),) = run(bf16_case, 1, family, kind, {}, {}, timeout=60)
    assert same


def test_transposed_experts():
    """Equal in fp32 within 1e-6; in bf16 within 5e-3, since the kernel rounds otherwise (engineering notes, expert layouts)."""
    hf, part = tiny_glm_model(0), data("two samples")
    with torch.no_grad():
        expected, _ = hf_sum_loss(hf, part)
        got = kit.plain(hf, expert_layout="stacked")({k: v for k, v in part.items() if k != "labels"})
    assert ((got - expected).norm() / expected.norm()).item() <= 1e-6
    ((_, error),) = run(bf16_case, 1, "glm4v_moe", "two samples", {}, {"expert_layout": "stacked"}, timeout=60)
    assert error <= 5e-3


def test_the_loop_of_experts_is_the_switch():
    hf, part = tiny_glm_model(0), data("two samples")
    model = kit.plain(hf, grouped=False)
    assert model.model.language_model.layers[1].mlp.experts.matmul is grouped_matmul_loop
    with torch.no_grad():
        expected, _ = hf_sum_loss(hf, part)
        got = model({k: v for k, v in part.items() if k != "labels"})
    assert ((got - expected).norm() / expected.norm()).item() <= 2.9e-6


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda d: d["pixel_values"].resize_(12, 1176), "pixel_values has 12 rows, but image_grid_thw .* needs 16"),
        (lambda d: d["image_grid_thw"].copy_(torch.tensor([[1, 4, 8]])), "sample 0 of the batch has 4 image tokens"),
        (lambda d: d.pop("image_grid_thw"), "no image is left"),
    ],
)
def test_image_tokens_and_features_must_agree(change, message):
    model, part = kit.plain(tiny_glm_model(0)), data("one image")
    change(part)
    with pytest.raises(UserError, match=message):
        model(part)
