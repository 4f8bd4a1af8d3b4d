"""Head and embedding as one parameter: through meta, sharding and a step (field case B12)."""

from __future__ import annotations

import pytest
import torch

from mm_models.fsdp2 import assembly
from tests.fsdp2 import kit
from tests.harness import run
from tests.models import tiny_glm_model


def case(rank: int, layout: dict, tied: bool) -> dict:
    hf = tiny_glm_model(0, tie_word_embeddings=tied)
    data = kit.global_batch()
    _, expected, _ = kit.reference(hf, data)
    model = kit.assemble(hf, **layout)
    embedding = model.model.language_model.embed_tokens
    same = [model.lm_head.weight is embedding.weight]
    kit.backward(model, kit.mine(data))
    before = kit.whole(embedding.weight).detach().clone()
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=False).step()
    same.append(model.lm_head.weight is embedding.weight)
    delta = {"embedding": before - kit.whole(embedding.weight).detach()}
    hf.zero_grad()
    return {
        "same": same,
        "count": (len(list(model.parameters())), len(list(hf.parameters()))),
        "delta": kit.worst(kit.relative(delta, {"embedding": expected["model.language_model.embed_tokens.weight"]})),
        "gradient": kit.worst(kit.relative(kit.gradients(model), expected)),
        "names": [name for name in assembly.named_tensors(model) if "embed_tokens" in name or "lm_head" in name],
        "empty": not delta["embedding"].any().item(),
    }


@pytest.mark.parametrize("name", ["one", "fsdp2", "ep2", "hsdp2x2"])
def test_both_uses_are_one_parameter(name):
    processes, layout = kit.LAYOUTS[name]
    for result in run(case, processes, layout, True, timeout=60):
        assert result["same"] == [True, True] and result["count"][0] == result["count"][1]
        assert result["delta"][0] < 1e-4 and result["gradient"][0] < 1e-4 and not result["empty"], result
        assert result["names"] == ["model.language_model.embed_tokens.weight"]


def test_untied_are_two():
    for result in run(case, 2, {}, False, timeout=60):
        assert result["same"] == [False, False] and result["count"][0] == result["count"][1]
        assert result["names"] == ["model.language_model.embed_tokens.weight", "lm_head.weight"]
