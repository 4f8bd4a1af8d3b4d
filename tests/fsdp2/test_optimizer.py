"""AdamW over local shards: torch's own on the whole tensors, whatever mesh a parameter is on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mm_models.config.fsdp2.training import Training
from mm_models.errors import UserError
from mm_models.fsdp2.optimizer import Optimizer
from mm_models.fsdp2.shards import shard_of
from tests.harness import run

SHAPES = {
    "experts": (4, 6, 5),
    "embedding": (7, 3),
    "norm.weight": (5,),
    "proj.bias": (1, 4),
    "small": (1, 3),
    "plain": (2, 3),
}
STEPS = 3


def training(**changes) -> Training:
    return Training(**{"train_iters": 9, "lr": 0.1, "weight_decay": 0.1, "from_scratch": True} | changes)


def values(kind: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(kind)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each on a mesh of its own kind; `embedding` and `small` are cut unevenly, so that some ranks hold nothing of `small`."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep_fsdp", "ep"))
    places = {
        "experts": (grid, [Shard(1), Shard(0)]),
        "embedding": (line, [Shard(0)]),
        "norm.weight": (line, [Shard(0)]),
        "proj.bias": (grid, [Replicate(), Shard(1)]),
        "small": (line, [Shard(0)]),
    }
    return {name: distribute_tensor(t, *places[name]) if name in places else t.clone() for name, t in whole.items()}


def _case(rank: int, fused: bool, half: bool) -> dict:
    parameters = {name: torch.nn.Parameter(t) for name, t in spread(values(0)).items()}
    optimizer = Optimizer(parameters, training(adam_fused=fused))
    for step in range(STEPS):
        if half and step == 2:  # take the state into another optimizer, as a resumed run does
            kept = {n: {k: s.local.clone() for k, s in each.items()} for n, each in optimizer.moments().items()}
            optimizer = Optimizer(parameters, training(adam_fused=fused))
            for name, each in optimizer.moments().items():
                for moment, box in each.items():
                    box.local.copy_(kept[name][moment])
            optimizer.resume(2)
        for name, grad in spread(values(step + 1)).items():
            parameters[name].grad = grad
        optimizer.step(0.1 / (step + 1))
        assert all(p.grad is None for p in parameters.values())
    boxes = {name: shard_of(p) for name, p in parameters.items()}
    found = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
    moments = {
        (name, moment): (box.start, box.shape, box.writes, box.local.clone())
        for name, each in optimizer.moments().items()
        for moment, box in each.items()
    }
    return {
        "weights": {name: t.detach() for name, t in found.items()},
        "moments": moments,
        "steps": optimizer.steps,
        "undecayed": optimizer.undecayed,
        "boxes": {name: (box.start, tuple(box.local.shape), box.writes) for name, box in boxes.items()},
    }


def torchs() -> tuple[dict[str, torch.Tensor], dict]:
    parameters = {name: torch.nn.Parameter(t) for name, t in values(0).items()}
    decays = [p for n, p in parameters.items() if n not in ("norm.weight", "proj.bias")]
    rest = [parameters["norm.weight"], parameters["proj.bias"]]
    adam = torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.1)
    for step in range(STEPS):
        for name, grad in values(step + 1).items():
            parameters[name].grad = grad
        for group in adam.param_groups:
            group["lr"] = 0.1 / (step + 1)
        adam.step()
    return {name: p.detach() for name, p in parameters.items()}, {n: adam.state[p] for n, p in parameters.items()}


@pytest.mark.parametrize(
    "fused, half", [(True, False), (False, False), (True, True)], ids=["fused", "plain", "resumed"]
)
def test_shards_on_several_meshes_are_stepped_as_the_whole(fused, half):
    weights, state = torchs()
    ranks = run(_case, 4, fused, half)
    for found in ranks:
        assert found["steps"] == STEPS and found["undecayed"] == ["norm.weight", "proj.bias"]
        for name, want in weights.items():
            torch.testing.assert_close(found["weights"][name], want, rtol=1e-6, atol=1e-7)
    for name, shape in SHAPES.items():  # the boxes that are written partition every tensor, moments included
        covered = torch.zeros(shape)
        for found in ranks:
            for moment in ("exp_avg", "exp_avg_sq"):
                start, whole, writes, local = found["moments"][name, moment]
                assert whole == shape and (start, tuple(local.shape), writes) == found["boxes"][name]
                where = tuple(slice(a, a + n) for a, n in zip(start, local.shape))
                torch.testing.assert_close(local, state[name][moment][where], rtol=1e-6, atol=1e-7)
            covered[where] += writes
        assert (covered == 1).all(), name


def test_frozen_parameters_are_left_out_and_all_frozen_is_refused():
    one, two = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = run(_frozen, 1, one, two)[0]
    assert optimizer == ["one"]


def _frozen(rank: int, one, two) -> list[str]:
    with pytest.raises(UserError, match="nothing to train"):
        Optimizer({"two": two}, training())
    return [piece.name for piece in Optimizer({"one": one, "two": two}, training()).pieces]
