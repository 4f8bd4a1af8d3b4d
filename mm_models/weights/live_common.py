"""What loading into a live model has in common, whatever the target: the report, the draw from a seed, the comparison of models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mm_models.config.binding import differences
from mm_models.errors import UserError
from mm_models.weights import stores
from mm_models.weights.boxes import Placement, Shape, intersect
from mm_models.weights.model_map import WeightMap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What was loaded: from where ("hf", "mm" or "dcp"), which iteration (None: release or Hugging Face), how much was read, what
    was ignored by name, and which tensors no source filled (only where that was allowed)."""

    kind: str
    folder: Path
    iteration: int | None
    tensors: int
    bytes_read: int
    ignored: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()


def grouped(sizes: Iterable[tuple[str, int]], limit: int) -> Iterator[list[str]]:
    """The names, in order, in groups of at most `limit` bytes (a single name may exceed it)."""
    group, size = [], 0
    for name, nbytes in sizes:
        if group and nbytes and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    if group:
        yield group


def draw_into(wmap: WeightMap, live: Mapping[str, list[tuple[torch.Tensor, Placement]]], seed: int) -> None:
    """Fill `live` (canonical global tensor -> tensors and the boxes of it they hold) as if the whole model were drawn.

    Each Hugging Face tensor comes from a generator seeded by (seed, its name): weights are normal with the section's
    `init_method_std`, biases 0, norms 1, router bias 0; drawn in fp32 and rounded.
    """
    import torch

    model = wmap.model
    stds = {"vision_encoder": model.vision, "vision_projector": model.projector, "text_decoder": model.text}
    with torch.no_grad():
        for hf in wmap.hf("per_expert").values():
            wanted = [
                (tensor, placement, region, common)
                for placement in hf.placements
                for tensor, region in live.get(placement.tensor, ())
                if (common := intersect(placement.global_box, region.global_box))
            ]
            if not wanted:
                continue
            drawn = _draw(hf.name, hf.view, hf.init, seed, stds[hf.section].init_method_std)
            for tensor, placement, region, (start, extent) in wanted:
                here, there = _within(start, extent, region), _within(start, extent, placement)
                tensor[here].copy_(drawn[there])


def _within(start: Shape, extent: Shape, held: Placement) -> tuple[slice, ...]:
    """The slices of a stored tensor that hold the global box `start`/`extent`, which lies inside `held`."""
    return tuple(slice(s - g + at, s - g + at + n) for s, g, at, n in zip(start, held.start, held.local, extent))


def _draw(name: str, shape: tuple[int, ...], init: str, seed: int, std: float) -> torch.Tensor:
    import torch

    if init != "normal":
        return torch.full(shape, {"zeros": 0.0, "ones": 1.0}[init])
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float32) * std


def check_same_model(wmap: WeightMap, theirs: WeightMap, folder: Path) -> None:
    """The checkpoint's model must have the same global tensors, and agree in every number that the forward pass depends on."""
    names = set(theirs.tensors) & set(wmap.tensors)
    faults = stores.name_faults(
        set(theirs.tensors), wmap.tensors, {n: (theirs.tensors[n].shape, wmap.tensors[n].shape) for n in names}
    )
    if faults:
        raise UserError(f"{folder} holds another model than model.json: " + "; ".join(faults) + ".")
    differs = [
        f"{key} is {here!r}, the checkpoint's is {there!r}"
        for key, here, there in differences(wmap.model, theirs.model)
    ]
    if differs:
        raise UserError(f"model.json disagrees with {folder}: " + "; ".join(differs) + ".")
