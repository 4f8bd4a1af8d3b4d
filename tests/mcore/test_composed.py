"""A tower of one family before a decoder of another: one model.json, no code of its own.

Held to Hugging Face's modules of the two halves: the one family's model with the other's `visual` in the place of its own. The
folder of such a model has a config.json that holds the model.json (`config.family.Composed`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mm_models.config.model import ModelConfig
from tests.composed import MIXES, composed_folder, composed_json
from tests.harness import run
from tests.mcore import test_bit_equal, test_topologies
from tests.models import tiny_model

SPLITS = {
    # mix: {name: layer lists}
    "glm4v+qwen2_5_vl": {
        "pp2": dict(vision_layers=[1, 1], text_layers=[0, 4]),
        "pp2-vpp2": dict(vision_layers=[[1, 0], [1, 0]], text_layers=[[0, 0], [1, 3]]),
    },
    "qwen2_5_vl+glm4v": {
        "pp2": dict(vision_layers=[3, 1], text_layers=[0, 4]),
        "pp2-vpp2": dict(vision_layers=[[1, 1], [2, 0]], text_layers=[[0, 0], [1, 3]]),
    },
}
ONE, PP2_VPP2, TP2_PP2 = dict(), dict(pp=2, vpp=2), dict(tp=2, pp=2, sequence_parallel=True)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    "processes,split,degrees", [(1, None, ONE), (2, "pp2-vpp2", PP2_VPP2)], ids=["one", "pp2-vpp2"]
)
@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_bit_equal_to_the_two_halves(mix, processes, split, degrees, dtype):
    lists = SPLITS[mix][split] if split else {}
    results = run(test_bit_equal.case, processes, dtype, lists, degrees, mix, timeout=60)
    assert any(result["count"] for result in results)
    assert all(result["equal"] for result in results), results


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "processes,split,degrees", [(4, "pp2", TP2_PP2), (2, "pp2-vpp2", PP2_VPP2)], ids=["tp2-pp2", "pp2-vpp2"]
)
def test_a_step_has_the_gradients_of_the_two_halves(mix, processes, split, degrees):
    """Losses and every gradient on every rank; so TP2 · PP2 trains as one process does."""
    case = run(test_topologies.kwargs_case, processes, 4, SPLITS[mix][split], degrees, {"family": mix}, timeout=60)
    test_topologies.check(case)


def tensors_case(rank: int, content: str, lists: dict, degrees: dict, folder: str) -> dict[str, torch.Tensor]:
    """This rank's tensors: loaded from `folder`, or drawn from a seed where there is none."""
    from mm_models.device import prepare
    from mm_models.layout import ParallelLayout
    from mm_models.mcore.assembly import build_chunks, init_parallel, named_tensors
    from mm_models.weights import live
    from tests.mcore.oracle import shard

    prepare()
    model = ModelConfig.model_validate_json(content)
    layout = ParallelLayout.for_world(dist.get_world_size(), **degrees)
    split, coords = model.split(layout, **lists), layout.coords(rank)
    init_parallel(layout, split, timeout_minutes=1)
    tensors = named_tensors(build_chunks(model, layout, split))
    place = {"model": model, "layout": layout, "coords": coords, "split": split}
    if folder:
        live.load_into(tensors, folder, **place)
        return tensors
    whole = ParallelLayout()
    full = {
        name: torch.zeros(one.shape)
        for name, one in live.build(model).local(whole.coords(0), whole, model.split(whole)).items()
    }
    live.initialise(full, model=model, layout=whole, coords=whole.coords(0), seed=7)
    live.initialise(tensors, **place, seed=7)
    wrong = [name for name in tensors if not torch.equal(tensors[name], shard(name, full[name], coords, layout, model))]
    assert not wrong, wrong
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "processes,split,degrees", [(4, "pp2", TP2_PP2), (2, "pp2-vpp2", PP2_VPP2)], ids=["tp2-pp2", "pp2-vpp2"]
)
def test_a_draw_is_the_same_on_every_topology(mix, processes, split, degrees):
    content = ModelConfig.model_validate(composed_json(mix)).model_dump_json()
    held = run(tensors_case, processes, content, SPLITS[mix][split], degrees, "", timeout=60)
    weights = [t for tensors in held for name, t in tensors.items() if "linear_" in name and name.endswith("weight")]
    assert weights and all(t.std() > 0 for t in weights)


@pytest.mark.parametrize("mix", MIXES)
def test_a_composed_folder_loads_live(mix, tmp_path: Path):
    """TP2 · PP2: each rank holds its shard of what the folder holds."""
    from mm_models.layout import ParallelLayout
    from tests.mcore.oracle import megatron_tensors, shard

    folder = composed_folder(tmp_path / "hf", mix, dtype=torch.float32)
    model = ModelConfig.model_validate(composed_json(mix))
    layout = ParallelLayout(tp=2, pp=2)
    held = run(tensors_case, 4, model.model_dump_json(), SPLITS[mix]["pp2"], TP2_PP2, str(folder), timeout=60)
    whole = megatron_tensors(tiny_model(mix, 0).state_dict(), model)
    seen = set()
    for rank, tensors in enumerate(held):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, shard(name, whole[name], layout.coords(rank), layout, model)), (rank, name)
        seen |= set(tensors)
    assert seen == set(whole)
