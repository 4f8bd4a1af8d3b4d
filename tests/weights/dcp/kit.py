"""Sharded models for the DCP tests: every rank's boxes as a trainer would hold them, and whole tensors put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mm_models.config.model import ModelConfig
from mm_models.weights.live import LiveShard
from mm_models.weights.model_map import build


def whole_shapes(model: ModelConfig, expert_layout: str = "stacked_hf") -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in build(model).hf(expert_layout).items()}


def split(size: int, parts: int, rank: int) -> tuple[int, int]:
    """(first, count) of torch's chunking: ceil-sized pieces, the last ones smaller or empty."""
    each = -(-size // parts)
    first = min(size, rank * each)
    return first, min(size, first + each) - first


def rank_shards(
    shapes: Mapping[str, tuple[int, ...]], world: int, rank: int, *, ep: int = 1, dtype=torch.float32
) -> dict[str, LiveShard]:
    """Dimension 0 over `world` ranks; experts over `ep` (fastest), then dimension 1 over the rest. Filled with NaN."""
    found = {}
    for name, shape in shapes.items():
        start, local = [0] * len(shape), list(shape)
        if ".experts." in name and len(shape) == 3:
            start[0], local[0] = split(shape[0], ep, rank % ep)
            start[1], local[1] = split(shape[1], world // ep, rank // ep)
        else:
            start[0], local[0] = split(shape[0], world, rank)
        tensor = torch.full(local, float("nan"), dtype=dtype)
        found[name] = LiveShard(tensor=tensor, start=tuple(start), shape=shape)
    return found


def gather(
    shapes: Mapping[str, tuple[int, ...]], world: int, fill: Callable[[dict[str, LiveShard]], object], **how
) -> tuple[dict[str, torch.Tensor], list]:
    """Whole tensors from every rank's boxes, each rank filled by `fill`; and what `fill` returned."""
    whole = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    answers = []
    for rank in range(world):
        shards = rank_shards(shapes, world, rank, **how)
        answers.append(fill(shards))
        for name, shard in shards.items():
            there = whole[name][tuple(slice(s, s + n) for s, n in zip(shard.start, shard.tensor.shape))]
            assert there.isnan().all(), name
            there.copy_(shard.tensor)
    return whole, answers


def stacked_state(state: Mapping[str, torch.Tensor], expert_layout: str = "stacked_hf") -> dict[str, torch.Tensor]:
    """A state dict of Hugging Face names, per expert or stacked, as whole fp32 tensors in the model's layout."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in state.items():
        head, mark, tail = name.partition(".experts.")
        if not mark:
            found[name] = tensor.float()
        elif tail[0].isdigit():
            number, part, _ = tail.split(".")
            experts.setdefault(head, {}).setdefault(int(number), {})[part] = tensor.float()
        else:
            found[name] = tensor.float()
    for head, each in experts.items():
        order = [each[number] for number in range(len(each))]
        gate_up = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in order])
        found[f"{head}.experts.gate_up_proj"] = gate_up
        found[f"{head}.experts.down_proj"] = torch.stack([e["down_proj"] for e in order])
    if expert_layout == "stacked":
        for name in found:
            if ".experts." in name:
                found[name] = found[name].transpose(1, 2).contiguous()
    return found


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
