"""Head and embedding as one parameter: through meta, sharding and a step (field case B12)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.fsdp2 import assembly
from tests.fsdp2 import kit
from tests.fsdp2.trainer_kit import STEPS, assert_same_step, changed, config, launch, reference, stock, write_hf
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


def test_training_saving_resuming_and_exporting_keep_them_one(tmp_path: Path):
    """Transposed experts on two expert-parallel ranks, resumed by one process: Hugging Face's losses, norms and weights at the end."""
    from transformers import Glm4vMoeForConditionalGeneration

    hf = write_hf(tmp_path / "hf", tie_word_embeddings=True)
    want = reference(hf, steps=STEPS, batch=4)
    save = {"training.save": str(tmp_path / "a"), "training.save_interval": 2, "model.expert_layout": "stacked"}
    two = {"parallel.expert_parallel_size": 2, "training.gradient_accumulation_steps": 2}
    first = launch(2, changed(config(hf), save | two), tmp_path / "a.jsonl")
    again = {"training.load": str(tmp_path / "a" / "iter_0000002"), "training.save": str(tmp_path / "b")}
    rest = launch(1, changed(config(hf, training__gradient_accumulation_steps=4), again), tmp_path / "b.jsonl")
    for got in (first, first[:2] + rest):
        assert [r["loss"] for r in got] == pytest.approx([r["loss"] for r in want["records"]], rel=1e-5)
        assert [r["grad_norm"] for r in got] == pytest.approx([r["grad_norm"] for r in want["records"]], rel=1e-4)
    assert not any("lm_head" in key for key in stock(tmp_path / "b" / f"iter_{STEPS:07d}"))
    assert main(["dcp_to_hf", "--dcp", str(tmp_path / "b"), "--hf", str(hf), "--out", str(tmp_path / "new")]) in (
        0,
        None,
    )
    network = Glm4vMoeForConditionalGeneration.from_pretrained(tmp_path / "new", dtype=torch.float32)
    assert network.lm_head.weight is network.get_input_embeddings().weight
    assert_same_step({n: p.detach() for n, p in network.named_parameters()}, want["weights"], steps=STEPS)
