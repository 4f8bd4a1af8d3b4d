"""Reading token dumps (see `tokens`): global batches in their order, whatever the number of data-parallel ranks.

    dump = Dump(folder)
    dump.steps             step numbers
    dump.batch(step)       GlobalBatch: rows in the order of the global batch, and its images

    difference(a, b)       the first difference of two dumps, or None

Rows are compared bit by bit. How far a row is padded is not a difference as long as the surplus is attended to by
nothing and enters no loss: it depends on the micro-batch size and on the padding multiple of a topology.

Refused: a folder without a dump, ranks or stages that are missing, and stages of one rank that were given different data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mm_models.errors import UserError
from mm_models.train.tokens import NARROW, Place, tensor_name

PARTS = (*NARROW, "loss_mask")
ROWS = ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids")
"""Parts with one row for each sample, in the order in which they are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One sample as it stood in its micro-batch: each part (S,), position_ids (3, S)."""

    sample_id: int
    parts: dict[str, Tensor]

    @property
    def length(self) -> int:
        return max((part.shape[-1] for part in self.parts.values()), default=0)

    def ids(self) -> list[int]:
        """Token ids without padding."""
        ids = self.parts.get("input_ids", torch.empty(0, dtype=torch.int32))
        return ids[self.parts["attention_mask"] != 0].tolist() if len(ids) else []

    def trained(self) -> list[bool]:
        """Of each of `ids`, whether it is a label."""
        if not {"labels", "attention_mask"} <= self.parts.keys():
            return [False] * len(self.ids())
        return (self.parts["loss_mask"][self.parts["attention_mask"] != 0] != 0).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """`images` are (grid, hash of the pixels) in the order of the rows."""

    rows: list[Row]
    images: list[tuple[tuple[int, ...], str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """`part` is one of `ROWS`, sample_ids, images or steps; `at` the token of the row where that means something."""

    step: int
    part: str
    what: str
    a: Row | None = None
    b: Row | None = None
    at: int | None = None


class _File:
    """One rank's two files."""

    def __init__(self, path: Path):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self.place = Place(**{field.name: content[field.name] for field in dataclasses.fields(Place)})
            self.tokenizer, self.path = content["tokenizer"], path
            self.steps = {int(step): micro for step, micro in content["steps"].items()}
            self._tensors = safe_open(path.with_suffix(".safetensors"), "pt")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise UserError(
                f"{path.with_suffix('')}.*: not a token dump, or cut off ({error!r}). Dump again."
            ) from error
        self._names = set(self._tensors.keys())

    def micro(self, step: int, index: int) -> dict[str, Any]:
        """Whatever this file has of a micro-batch."""
        found: dict[str, Any] = {"sample_ids": self.steps[step][index]["sample_ids"]}
        names = {part: tensor_name(step, index, part) for part in PARTS}
        found |= {part: self._tensors.get_tensor(name) for part, name in names.items() if name in self._names}
        pixels = self.steps[step][index]["pixels"]
        return found if pixels is None else found | {"pixels": pixels}


class Dump:
    """A dump's folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        files = [_File(path) for path in sorted(self.folder.glob("dp*.pp*.json"))]
        if not files:
            raise UserError(f"{folder}: no token dump there (dp0.pp0.json ...).")
        sizes = {(file.place.dp_size, file.place.stages) for file in files}
        if len(sizes) > 1:
            raise UserError(f"{folder}: files of several dumps (data-parallel ranks, stages: {sorted(sizes)}).")
        dp, stages = sizes.pop()
        wanted = [
            Place(dp_rank=rank, dp_size=dp, stage=stage, stages=stages) for rank in range(dp) for stage in range(stages)
        ]
        here = {file.place.name: file for file in files}
        missing = [place.name for place in wanted if place.name not in here]
        if missing:
            raise UserError(
                f"{folder}: the dump is not complete, {', '.join(missing)} missing of {dp} x {stages} files."
            )
        self._ranks = [[here[f"dp{rank}.pp{stage}"] for stage in range(stages)] for rank in range(dp)]
        self.dp_size, self.stages, self.tokenizer = dp, stages, files[0].tokenizer
        self.steps = sorted(files[0].steps)
        odd = [file.path.name for file in files if sorted(file.steps) != self.steps]
        if odd:
            raise UserError(f"{folder}: {', '.join(odd)} and {files[0].path.name} have different steps.")

    def batch(self, step: int) -> GlobalBatch:
        """A step's global batch. Micro-batch m of rank r is the (m x ranks + r)-th of it (see the sampler)."""
        rows: list[Row] = []
        images: list[tuple[tuple[int, ...], str]] = []
        for index in range(len(self._ranks[0][0].steps[step])):
            for stages in self._ranks:
                micro = self._merged(stages, step, index)
                rows += _rows(micro)
                grids = micro["image_grid_thw"].tolist() if "image_grid_thw" in micro else []
                images += zip(map(tuple, grids), micro.get("pixels", [""] * len(grids)), strict=True)
        return GlobalBatch(rows=rows, images=images)

    def _merged(self, stages: Sequence[_File], step: int, index: int) -> dict[str, Any]:
        """What the stages of one rank were given together."""
        merged: dict[str, Any] = {}
        for stage in stages:
            for part, value in stage.micro(step, index).items():
                known = merged.setdefault(part, value)
                if not (torch.equal(known, value) if isinstance(value, Tensor) else known == value):
                    raise UserError(
                        f"{self.folder}: step {step}, micro-batch {index} of data-parallel rank {stage.place.dp_rank}: "
                        f"stage {stage.place.stage} was given other {part} than the stages before it."
                    )
        return merged


def _rows(micro: dict[str, Any]) -> list[Row]:
    """The samples of a micro-batch."""
    return [
        Row(
            sample_id=id,
            parts={
                name: micro[name][:, at] if name == "position_ids" else micro[name][at]
                for name in ROWS
                if name in micro
            },
        )
        for at, id in enumerate(micro["sample_ids"])
    ]


def difference(a: Dump, b: Dump, *, batches: int | None = None) -> Difference | None:
    """The first difference, in the order of steps, rows and parts; of the first `batches` steps where given."""
    left, right = a.steps[:batches], b.steps[:batches]
    for step in [step for step in left if step in right]:
        found = next(_differences(step, a.batch(step), b.batch(step)), None)
        if found:
            return found
    odd = sorted(set(left) ^ set(right))
    if odd:
        where = a if odd[0] in left else b
        return Difference(
            step=odd[0], part="steps", what=f"{len(odd)} steps from {odd[0]} on are not in both: {where.folder} has it"
        )
    return None


def _differences(step: int, a: GlobalBatch, b: GlobalBatch) -> Iterator[Difference]:
    if len(a.rows) != len(b.rows):
        yield Difference(
            step=step, part="sample_ids", what=f"a global batch of {len(a.rows)} and of {len(b.rows)} samples"
        )
        return
    for place, (left, right) in enumerate(zip(a.rows, b.rows, strict=True)):
        if left.sample_id != right.sample_id:
            what = f"place {place} of the batch: sample {left.sample_id} and sample {right.sample_id}"
            yield Difference(step=step, part="sample_ids", what=what, a=left, b=right)
        for part in ROWS:
            at, what = _first(part, left, right)
            if what:
                yield Difference(step=step, part=part, what=f"sample {left.sample_id}, {what}", a=left, b=right, at=at)
    if len(a.images) != len(b.images):
        yield Difference(step=step, part="images", what=f"{len(a.images)} and {len(b.images)} images in the batch")
    for place, (one, other) in enumerate(zip(a.images, b.images)):
        if one[0] != other[0]:
            yield Difference(
                step=step, part="images", what=f"image {place} of the batch has grid {one[0]} and {other[0]}"
            )
        if one[1] != other[1]:
            what = f"image {place} of the batch has other pixels (hash {one[1] or 'none'} and {other[1] or 'none'})"
            yield Difference(step=step, part="images", what=what)


def _first(part: str, a: Row, b: Row) -> tuple[int | None, str | None]:
    """The first token at which a part differs, and the words for it."""
    if part not in a.parts or part not in b.parts:
        alone = [name for name, row in (("first", a), ("second", b)) if part in row.parts]
        return None, f"{part} is in the {alone[0]} dump alone" if alone else None
    left, right = a.parts[part], b.parts[part]
    common = min(left.shape[-1], right.shape[-1])
    wrong = (left[..., :common] != right[..., :common]).reshape(-1, common).any(0).nonzero()
    if len(wrong):
        at = int(wrong[0])
        return at, f"{part}[{at}]: {left[..., at].tolist()} and {right[..., at].tolist()}"
    longer = a if left.shape[-1] > common else b
    for mask in ("attention_mask", "loss_mask"):
        surplus = longer.parts.get(mask, left[..., :0])[common:].nonzero()
        if len(surplus):
            at = common + int(surplus[0])
            return at, f"{part}: {left.shape[-1]} and {right.shape[-1]} tokens, and token {at} is no padding"
    return None, None
