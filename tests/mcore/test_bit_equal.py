"""Forward through the real schedule on real processes: logits bit-equal to Hugging Face at TP1, within 1e-5 with TP, SP and ETP.

With EP > 1 in fp32 the reference is Hugging Face on the concatenated batch of the expert-parallel group: an fp32 matrix product's
row depends on the number of rows below 12 of them, and experts see the tokens of all ranks (tests/numerics).
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from tests.harness import run
from tests.mcore.batches import batch, hf_inputs
from tests.mcore.cases import assemble
from tests.mcore.test_topologies import TOPOLOGIES
from tests.models import tiny_model


def concatenated(batches: list[dict]) -> dict:
    """Micro-batches of equal length as one; positions are joined along the batch axis."""
    joined = {key: torch.cat([b[key] for b in batches if key in b]) for key in batches[0]}
    joined["position_ids"] = torch.cat([b["position_ids"] for b in batches], dim=1)
    return joined


def case(
    rank: int, dtype: torch.dtype, split: dict, degrees: dict, family: str = "glm4v_moe", overrides: dict | None = None
) -> dict:
    hf = tiny_model(family, 0, dtype, **(overrides or {}))
    chunks, _, layout = assemble(hf, dtype=dtype, split=split, **degrees)
    everything = [batch(20 + i, images=[[(4, 4 + 2 * (i % 2))]], length=40) for i in range(4)]
    dp = layout.coords(rank).dp
    mine = everything[dp :: layout.dp]

    def forward_step(iterator, chunk):
        return chunk({k: v for k, v in next(iterator).items() if k != "labels"}), lambda x, non_loss_data: x

    with torch.no_grad():
        logits = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(mine) for _ in chunks] if layout.vpp > 1 else iter(mine),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(mine),
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        worst, equal = 0.0, True
        for at, got in enumerate(logits):
            group = everything[at * layout.dp : (at + 1) * layout.dp] if layout.ep > 1 else [mine[at]]
            expected = (
                hf(**hf_inputs(concatenated(group))).logits[dp : dp + 1]
                if layout.ep > 1
                else hf(**hf_inputs(mine[at])).logits
            )
            tp = layout.coords(rank).tp
            expected = expected.chunk(layout.tp, -1)[tp].transpose(0, 1)
            equal = equal and torch.equal(got, expected)
            worst = max(worst, ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item())
    return {"count": len(logits), "equal": equal, "worst": worst}


EXACT = [
    "dp2", "pp2-vit20-llm22", "pp2-vit11-llm04", "pp2-head-only", "pp2-vit-starts-late", "pp2-vpp2", "pp2-vpp2-gap",
    "pp2-vpp2-late-vit-head-only", "ep2", "pp4-gap-head-only", "pp4-vpp2", "pp2-ep2",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", EXACT)
def test_logits_are_bit_equal(name, dtype):
    processes, _, split, degrees = TOPOLOGIES[name]
    results = run(case, processes, dtype, split, degrees, timeout=60)
    assert any(result["count"] for result in results)
    assert all(result["equal"] for result in results), results


@pytest.mark.parametrize(
    "name", ["tp2", "etp2", "tp2-ep2-etp1", "tp2-pp2", "tp2-dp2-ep2", "tp2-dp2-ep4-etp1", "dp4-ep2-etp2"]
)
def test_logits_with_tensor_parallel(name):
    processes, _, split, degrees = TOPOLOGIES[name]
    results = run(case, processes, torch.float32, split, degrees, timeout=60)
    assert any(result["count"] for result in results)
    assert max(result["worst"] for result in results) <= 1e-5, results
