"""Dense families sharded: what the files on GLM-4.5V show at length, once a family. Ragged windows, a text-only rank beside images."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mm_models.fsdp2 import assembly, grads, sharding
from tests.fsdp2 import kit
from tests.fsdp2.test_layouts import unlabelled
from tests.harness import run
from tests.mcore.batches import hf_inputs
from tests.models import tiny_model

EMBEDDING = "model.language_model.embed_tokens.weight"
QUICK = [("qwen2_vl", "fsdp2", True), ("qwen2_5_vl", "fsdp2", False), ("glm4v", "fsdp2", False)]
CASES = [(family, name, tied) for family in ("qwen2_vl", "qwen2_5_vl", "glm4v") for name in ("one", "fsdp2", "fsdp4", "hsdp2x2")
         for tied in (False, True)]  # fmt: skip
DIRTY = (2, 4, 8, 16, 64, 320, 4096)
"""Sizes of fresh memory that need not be zero: those of the frequency buffers are among them."""


def step_case(rank: int, family: str, layout: dict, tied: bool) -> dict:
    hf = tiny_model(family, tie_word_embeddings=tied)
    data = kit.global_batch()
    loss, expected, norm = kit.reference(hf, data)
    dirty = [torch.full((n,), float("nan")) for n in DIRTY]
    del dirty
    model = kit.assemble(hf, policy=sharding.Policy(forward_prefetch=1, backward_prefetch=1), **layout)
    buffers, wanted = dict(model.named_buffers()), dict(hf.named_buffers())
    with torch.no_grad():
        logits = [torch.equal(model(unlabelled(part)), hf(**hf_inputs(part)).logits) for part in kit.mine(data)]
    total = kit.backward(model, kit.mine(data))
    dist.all_reduce(total)
    before = {name: kit.whole(p).detach().clone() for name, p in model.named_parameters()}
    found, got = kit.gradients(model), grads.norm(model)
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=False).step()
    delta = {name: before[name] - kit.whole(p).detach() for name, p in model.named_parameters()}
    return {
        "buffers": {name for name in wanted if torch.equal(buffers[name], wanted[name])} == set(wanted) == set(buffers),
        "rotary": sorted(name.split(".")[-1] for name in wanted),
        "logits": logits,
        "loss": abs(total.item() - loss) / loss,
        "norm": abs(got - norm) / norm,
        "gradient": kit.worst(kit.relative(found, expected)),
        "delta": kit.worst(kit.relative(delta, expected)),
        "moved": all(bool(each.any()) for name, each in delta.items() if not name.endswith("k_proj.bias")),
        "one": model.lm_head.weight is model.get_input_embeddings().weight,
        "names": [name for name in assembly.named_tensors(model) if name in (EMBEDDING, "lm_head.weight")],
    }


@pytest.mark.parametrize(
    ("family", "name", "tied"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)  # fmt: skip
def test_a_step_equals_hugging_faces_in_one_process(family, name, tied):
    """Meta init with dirty memory: buffers bit for bit on every rank (B11). Head and embedding one tensor where tied, and one SGD
    step's delta that of one process (B12). Logits bit for bit, loss, gradients and norm."""
    processes, layout = kit.LAYOUTS[name]
    results = run(step_case, processes, family, layout, tied, timeout=60)
    for result in results:
        assert result["buffers"] and result["rotary"] == ["inv_freq"] * 2 + ["original_inv_freq"] * 2
        assert result["logits"] == [True] * (4 // processes)
        assert result["loss"] < 1e-6 and result["norm"] < 1e-6 and result["moved"], result
        assert result["gradient"][0] < (1e-5 if processes == 1 else 1e-4) and result["delta"][0] < 1e-4, result
        assert result["one"] == tied and result["names"] == [EMBEDDING] + ["lm_head.weight"] * (not tied)


def bf16_case(rank: int, family: str) -> list[bool]:
    model = kit.assemble(tiny_model(family), policy=kit.BF16)
    hf = tiny_model(family, dtype=torch.bfloat16)
    with torch.no_grad():
        return [torch.equal(model(unlabelled(p)), hf(**hf_inputs(p)).logits) for p in kit.mine(kit.global_batch())]


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl", "glm4v"))]
)
def test_bf16_is_bit_equal_on_two_ranks(family):
    assert run(bf16_case, 2, family, timeout=60) == [[True, True]] * 2
