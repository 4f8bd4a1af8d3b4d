"""Sizes of the meshes: what follows from what, and what does not fit."""

from __future__ import annotations

import pytest

from mm_models.errors import UserError
from mm_models.fsdp2 import mesh
from mm_models.fsdp2.mesh import Sizes
from tests.harness import run


@pytest.mark.parametrize(
    "world,given,expected",
    [
        (1, {}, dict(shard=1, replicate=1, ep=1, ep_fsdp=1, ep_replicate=1)),
        (8, {}, dict(shard=8, replicate=1, ep=1, ep_fsdp=8, ep_replicate=1)),
        (8, dict(shard=2), dict(shard=2, replicate=4, ep=1, ep_fsdp=2, ep_replicate=4)),
        (8, dict(ep=4), dict(shard=8, replicate=1, ep=4, ep_fsdp=2, ep_replicate=1)),
        (8, dict(ep=4, shard=4), dict(shard=4, replicate=2, ep=4, ep_fsdp=1, ep_replicate=2)),
        (8, dict(ep=8, shard=2), dict(shard=2, replicate=4, ep=8, ep_fsdp=1, ep_replicate=1)),
        (8, dict(ep=2, ep_fsdp=1), dict(shard=8, replicate=1, ep=2, ep_fsdp=1, ep_replicate=4)),
        (12, dict(ep=2, shard=6), dict(shard=6, replicate=2, ep=2, ep_fsdp=3, ep_replicate=2)),
        (12, dict(ep=3, shard=12), dict(shard=12, replicate=1, ep=3, ep_fsdp=4, ep_replicate=1)),
        (128, dict(ep=16), dict(shard=128, replicate=1, ep=16, ep_fsdp=8, ep_replicate=1)),
    ],
)
def test_sizes(world, given, expected):
    assert Sizes.of(world, **given) == Sizes(world=world, **expected)


@pytest.mark.parametrize(
    "given,message",
    [
        (dict(shard=3), r"fully_shard_parallel_size is 3, but it must divide the world size: 8. Possible: \[1, 2, 4, 8\]"),
        (dict(shard=0), "fully_shard_parallel_size is 0"),
        (dict(ep=16), "expert_parallel_size is 16, but it must divide the world size: 8"),
        (dict(ep=4, ep_fsdp=4), r"expert_fully_shard_parallel_size is 4, .* world size / expert_parallel_size 4: 2. Possible: \[1, 2\]"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(given, message):
    with pytest.raises(UserError, match=message):
        Sizes.of(8, **given)


def test_sizes_that_contradict_each_other():
    with pytest.raises(UserError, match="= 4 and ep_replicate 1 x ep_fsdp 1 x ep 4 = 4 must both be the world size 8"):
        Sizes(world=8, shard=4, ep=4)


def groups(rank: int, sizes: Sizes) -> dict:
    import torch.distributed as dist

    made = mesh.make(sizes, "cpu")
    return {
        "dense": (made.dense.mesh_dim_names, made.dense.mesh.tolist()),
        "experts": (made.experts.mesh_dim_names, made.experts.mesh.tolist()),
        "ep": dist.get_process_group_ranks(made.ep_group),
    }


def test_which_ranks_stand_together():
    """Expert parallel is the fastest axis: ranks of one group are neighbours."""
    found = run(groups, 4, Sizes.of(4, shard=2, ep=2, ep_fsdp=2))
    assert found[1]["dense"] == (("replicate", "shard"), [[0, 1], [2, 3]])
    assert [result["ep"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["experts"] for result in found] == [
        (("ep_fsdp",), ranks) for ranks in ([0, 2], [1, 3], [0, 2], [1, 3])
    ]
    found = run(groups, 4, Sizes.of(4, shard=2, ep=2))
    assert found[3]["experts"] == (("ep_replicate", "ep_fsdp"), [[1], [3]]) and found[3]["ep"] == [2, 3]


def wrong_world(rank: int) -> str:
    with pytest.raises(UserError) as refusal:
        mesh.make(Sizes.of(4), "cpu")
    return str(refusal.value)


def test_another_world_is_refused():
    assert run(wrong_world, 2)[0] == "the meshes are for 4 ranks, the world has 2."
