"""A dump of the first batches of a run, taken where the model receives them: after collation, the split over ranks and
the move to the device, before the model does anything with them. Both targets call the same hook.

    with recording(module, position, folder=..., batches=8, place=Place(...), tokenizer=...):
        ...steps

A pre-hook on the module a micro-batch is handed to keeps of the first `batches` steps, for each micro-batch:

    input_ids, labels      (B, S) int32, as they are (labels not shifted)
    loss_mask              (B, S) uint8, 1 at the labels that enter the loss
    attention_mask         (B, S) uint8
    position_ids           (3, B, S) int32
    image_grid_thw         (images, 3) int32
    sample_ids, and a hash of each image's pixels as the model gets them

Files: `dp3.pp0.safetensors` holds the tensors of data-parallel rank 3, `000001.00.input_ids` that of step 1, micro-batch
0; `dp3.pp0.json` the rest. One rank of each pipeline stage writes, the first of its tensor-parallel group, and writes
every part its stage is given: what one stage lacks another has, and what two have is compared when the dump is read
(see `token_dump`). A run that fails writes what it has. Nothing is written on top of another dump.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_models.components.loss import IGNORE
from mm_models.errors import UserError
from mm_models.train.session import Position

NARROW = {
    "input_ids": torch.int32,
    "labels": torch.int32,
    "attention_mask": torch.uint8,
    "position_ids": torch.int32,
    "image_grid_thw": torch.int32,
}
"""Parts of a batch that are kept, in types that hold them exactly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Whose dump a file is."""

    dp_rank: int = 0
    dp_size: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def name(self) -> str:
        return f"dp{self.dp_rank}.pp{self.stage}"


def check_folder(folder: str | None) -> None:
    """Refuse a folder that holds a dump. Every rank may ask: none writes before all have."""
    if folder is None:
        return
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{there}: not a folder; a token dump needs one.")
    if not os.access(there, os.W_OK):
        raise UserError(f"{there}: a folder that cannot be written, for the token dump {folder}.")
    if any(Path(folder).glob("dp*.pp*.*")):
        raise UserError(f"{folder}: holds a token dump already. Name another folder, or remove it.")


class TokenDump:
    """The micro-batches of some steps, in memory until `write`."""

    def __init__(self, folder: str | Path, place: Place, *, tokenizer: str):
        """`tokenizer` is the folder whose tokenizer made the ids, for who reads the dump."""
        self._folder, self._place, self._tokenizer = Path(folder), place, tokenizer
        self._tensors: dict[str, Tensor] = {}
        self._steps: dict[int, list[dict[str, Any]]] = {}

    def first(self, default: int) -> int:
        """The first step, `default` as long as there is none."""
        return min(self._steps, default=default)

    def add(self, step: int, data: dict[str, Any]) -> None:
        """The next micro-batch of `step`."""
        micro = self._steps.setdefault(step, [])
        for name, value in _parts(data).items():
            self._tensors[tensor_name(step, len(micro), name)] = value
        micro.append({"sample_ids": list(data["sample_ids"]), "pixels": _pixel_hashes(data)})

    def write(self) -> None:
        """Write both files, the JSON file last: with it the dump is complete. Nothing where no step came."""
        if not self._steps:
            return
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        tensors, text = (self._folder / f"{self._place.name}.{kind}" for kind in ("safetensors", "json"))
        content = {**dataclasses.asdict(self._place), "tokenizer": self._tokenizer, "steps": self._steps}
        with _replacing(tensors) as path:
            save_file(self._tensors, path)
        with _replacing(text) as path:
            path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def tensor_name(step: int, micro: int, part: str) -> str:
    return f"{step:06}.{micro:02}.{part}"


@contextlib.contextmanager
def recording(
    module: torch.nn.Module,
    position: Position,
    *,
    folder: str | None,
    batches: int,
    place: Place,
    tokenizer: str,
    writes: bool = True,
) -> Iterator[None]:
    """Dump what `module` is handed as its first argument in the first `batches` steps within; `position` tells the step. What it
    is handed in an evaluation is left out.

    Nothing where `folder` is None, or on a rank that does not write. The files are there as soon as the next step
    begins, and at the latest when this ends, also by a failure.
    """
    if folder is None or not writes:
        yield
        return
    dump = TokenDump(folder, place, tokenizer=tokenizer)

    def hook(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if not module.training:
            return
        if position.step < dump.first(position.step) + batches:
            dump.add(position.step, arguments[0])
        else:
            finish()

    def finish() -> None:
        handle.remove()
        dump.write()
        closing.pop_all()

    handle = module.register_forward_pre_hook(hook, prepend=True)  # before a wrapper's own hook casts anything
    with contextlib.ExitStack() as closing:
        closing.callback(finish)
        yield


def _parts(data: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of what is kept of a micro-batch."""
    parts = {name: _narrow(name, data[name].cpu()) for name in NARROW if name in data}
    if "labels" in parts:
        mask = (parts["labels"] != IGNORE).to(torch.uint8)
        mask[:, 0] = 0  # the first token is predicted by none
        parts["loss_mask"] = mask
    return parts


def _narrow(name: str, value: Tensor) -> Tensor:
    small = value.to(NARROW[name], copy=True).contiguous()
    if not torch.equal(small.to(value.dtype), value):
        raise ValueError(f"token dump: {name} has values that {NARROW[name]} does not hold.")
    return small


def _pixel_hashes(data: dict[str, Any]) -> list[str] | None:
    """A hash of each image's pixels, type and values; None where the stage is given none."""
    if "pixel_values" not in data:
        return None
    pixels = data["pixel_values"].cpu().contiguous()
    sizes = data["image_grid_thw"].prod(1).tolist()
    return [
        hashlib.blake2b(str(part.dtype).encode() + part.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        for part in pixels.split(sizes)
    ]


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` that takes its place when all went well."""
    part = path.with_name(f".{path.name}.part")
    yield part
    os.replace(part, path)
