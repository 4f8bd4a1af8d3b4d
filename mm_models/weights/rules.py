"""What a weight map is written in: rules as data, one per Megatron tensor (or one per layer).

A rule names the Megatron tensor, the Hugging Face tensors it is made of (`hf`, a transform), its shape in named sizes, the
pipeline place that holds it, and how it is split (`shard`). A transform is a list of pieces, box to box; a shard is a
tuple of `Split`s. Both are index algebra (`boxes`): no torch, no files, no communication.

    Rule(mm="decoder.layers.{layer}.mlp.linear_fc1.weight", hf=Concat("...gate_proj.weight", "...up_proj.weight"),
         shape=("2ffn", "hidden"), place="text_layer", shard=GLU, when="dense")

The Hugging Face expert layouts a transform may know: `per_expert` (one 2-D tensor each) and `stacked_hf` (E, out, in).
Files of the FSDP2 target may also be `stacked` (E, in, out) or `flat` (E·in, out): `stacked_hf` with other bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mm_models.weights.boxes import Placement, Shape, partition_fault, volume

EXPERT_LAYOUTS = ("per_expert", "stacked_hf")
TRANSPOSED_LAYOUTS = ("stacked", "flat")
FILE_LAYOUTS = ("stacked_hf", "stacked", "flat", "per_expert")
Sizes = Mapping[str, int]


# --- shards -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Split:
    """Dimension `dim` is cut into equal slices along a parallel axis; with `parts` > 1 each of that many equal parts
    (gate and up) is cut by itself, and the local tensor is their concatenation. `unit` names the size that must divide:
    a fused QKV is cut between kv groups, never inside one."""

    dim: int
    axis: str
    parts: int = 1
    unit: str | None = None


Shard = tuple[Split, ...]
REPLICATE: Shard = ()
COLUMN: Shard = (Split(dim=0, axis="tp"),)
ROW: Shard = (Split(dim=1, axis="tp"),)
GLU: Shard = (Split(dim=0, axis="tp", parts=2),)
KV_GROUPS: Shard = (Split(dim=0, axis="tp", unit="groups"),)
QKV_PARTS: Shard = (Split(dim=0, axis="tp", parts=3, unit="heads"),)
EXPERT_GLU: Shard = (Split(dim=0, axis="ep"), Split(dim=1, axis="etp", parts=2))
EXPERT_ROW: Shard = (Split(dim=0, axis="ep"), Split(dim=2, axis="etp"))

SHARD_NAMES = {
    REPLICATE: "replicate", COLUMN: "column", ROW: "row", GLU: "glu", KV_GROUPS: "kv_groups",
    QKV_PARTS: "qkv_parts",
    EXPERT_GLU: "expert_glu", EXPERT_ROW: "expert_row",
}  # fmt: skip


def shard_regions(
    tensor: str, shape: Shape, shard: Shard, degrees: Mapping[str, int], ranks: Mapping[str, int]
) -> tuple[Shape, tuple[Placement, ...]]:
    """(local shape, placements) of the slice that `ranks` holds of the global tensor `tensor`.

    `degrees` and `ranks` map an axis ("tp", "ep", "etp") to its size and to this rank's coordinate on it.
    """
    local = list(shape)
    pieces: list[list[tuple[int, int, int]]] = [
        [(0, 0, n)] for n in shape
    ]  # per dim: (global start, local start, extent)
    for split in shard:
        degree, rank, size = degrees[split.axis], ranks[split.axis], shape[split.dim]
        part, rest = divmod(size, split.parts)
        slice_, rest2 = divmod(part, degree)
        assert not rest and not rest2, (
            f"{tensor} {shape}: dimension {split.dim} does not divide by {split.parts}x{degree}"
        )
        local[split.dim] = size // degree
        pieces[split.dim] = [(i * part + rank * slice_, i * slice_, slice_) for i in range(split.parts)]
        if degree == 1:
            pieces[split.dim] = [(0, 0, size)]
    placements = tuple(
        Placement(tensor, *(tuple(x) for x in zip(*combination))) for combination in itertools.product(*pieces)
    )
    return tuple(local), placements


# --- transforms ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one Hugging Face tensor that is a box of the Megatron tensor.

    `shape` is the Hugging Face tensor's own; `view` the same elements with the Megatron tensor's number of dimensions.
    """

    source: str
    shape: Shape
    view: Shape
    at: Shape
    to: Shape
    extent: Shape


class Transform(Protocol):
    """How a Megatron tensor of `shape` is made of Hugging Face tensors, and, read backwards, the other way round."""

    def pieces(self, shape: Shape, sizes: Sizes, expert_layout: str) -> Iterator[Piece]: ...

    def describe(self, prefix: str) -> str: ...


@dataclass(frozen=True)
class Same:
    """The tensor itself under another name."""

    name: str

    def pieces(self, shape: Shape, sizes: Sizes, expert_layout: str) -> Iterator[Piece]:
        zeros = (0,) * len(shape)
        yield Piece(self.name, shape, shape, zeros, zeros, shape)

    def describe(self, prefix: str) -> str:
        return prefix + self.name


@dataclass(frozen=True, init=False)
class Concat:
    """Equal parts stacked along dimension 0, in order: [gate; up]."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def pieces(self, shape: Shape, sizes: Sizes, expert_layout: str) -> Iterator[Piece]:
        part = (shape[0] // len(self.names), *shape[1:])
        zeros = (0,) * len(shape)
        for i, name in enumerate(self.names):
            yield Piece(name, part, part, zeros, (i * part[0], *zeros[1:]), part)

    def describe(self, prefix: str) -> str:
        return f"[{'; '.join(prefix + name for name in self.names)}]"


@dataclass(frozen=True, kw_only=True)
class QkvGroups:
    """Fused attention rows: for each kv group its query heads, then its key head, then its value head.

    `names` are (q, k, v), or one tensor that is already [q; k; v] whole. Sizes used: `heads`, `groups`, `head_dim`.
    Weights and biases alike.
    """

    names: tuple[str, ...]

    def pieces(self, shape: Shape, sizes: Sizes, expert_layout: str) -> Iterator[Piece]:
        heads, groups, dim = sizes["heads"], sizes["groups"], sizes["head_dim"]
        per_group, rest, zeros = heads // groups, shape[1:], (0,) * (len(shape) - 1)
        rows = (heads * dim, groups * dim, groups * dim)
        for group in range(groups):
            to = group * (per_group + 2) * dim
            for part, head_count in enumerate((per_group, 1, 1)):
                at = group * head_count * dim
                if len(self.names) == 1:
                    name, source = self.names[0], (sum(rows), *rest)
                    at += sum(rows[:part])
                else:
                    name, source = self.names[part], (rows[part], *rest)
                yield Piece(name, source, source, (at, *zeros), (to, *zeros), (head_count * dim, *rest))
                to += head_count * dim

    def describe(self, prefix: str) -> str:
        return f"per kv group [q..; k; v] of {', '.join(prefix + name for name in self.names)}"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """All experts of a layer, stacked on dimension 0. `per_expert` names hold `{expert}`; several of them (gate, up) are
    concatenated along the output dimension. `stacked_hf` is the same 3-D tensor under Hugging Face's name."""

    per_expert: tuple[str, ...]
    stacked_hf: str

    def pieces(self, shape: Shape, sizes: Sizes, expert_layout: str) -> Iterator[Piece]:
        if expert_layout == "stacked_hf":
            yield from Same(self.stacked_hf).pieces(shape, sizes, expert_layout)
            return
        assert expert_layout == "per_expert", expert_layout
        out = shape[1] // len(self.per_expert)
        for expert in range(shape[0]):
            for i, name in enumerate(self.per_expert):
                named = name.replace("{expert}", str(expert))
                yield Piece(
                    named, (out, shape[2]), (1, out, shape[2]), (0, 0, 0), (expert, i * out, 0), (1, out, shape[2])
                )

    def describe(self, prefix: str) -> str:
        return f"{prefix}{self.stacked_hf} | stack of {', '.join(prefix + name for name in self.per_expert)}"


# --- rules and tables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One Megatron tensor, or one per layer when its name holds `{layer}`.

    `place` is a place of `ModelSplit` (`vision_first`, `text_last`, ...), or `vision_layer` / `text_layer`.
    `when` names a kind of layer (`dense`, `moe`) or a feature of the model (`qkv_bias`, `untied`) the tensor needs.
    `alias` names the Megatron tensor this one is a second copy of (a tied head); `hf` is what a folder may hold of it all the same.
    `hold` "fp32" keeps the tensor in fp32 in the model whatever the file holds. `init` is the from-scratch draw.
    `part` chooses the Hugging Face prefix; None is the table's section.
    """

    mm: str
    hf: Transform
    shape: tuple[str, ...]
    place: str
    shard: Shard
    when: str | None = None
    kind: str = "param"
    hold: str | None = None
    init: str = "normal"
    part: str | None = None
    alias: str | None = None

    @property
    def expert(self) -> bool:
        return any(split.axis in ("ep", "etp") for split in self.shard)


@dataclass(frozen=True, kw_only=True)
class WeightTable:
    """The weight map of one `model_id`.

    `section` is its section of model.json; `mm_prefix` stands before every `mm` name; `hf_prefixes` maps a part to the
    Hugging Face prefix it has at home (a family may set others). `sizes`, `features` and `layer_kind` read the section.
    """

    model_id: str
    section: str
    mm_prefix: str
    hf_prefixes: Mapping[str, str]
    rules: tuple[Rule, ...]
    sizes: Callable[[Any], Sizes]
    features: Callable[[Any], frozenset[str]] = lambda config: frozenset()
    layer_kind: Callable[[Any, int], str] = lambda config, layer: "dense"

    def patterns(self) -> list[tuple[str, str, str, str]]:
        """(Megatron name, Hugging Face names, shape, shard) of every rule: what `mm-convert patterns` prints."""
        rows = []
        for rule in self.rules:
            prefix = self.hf_prefixes[rule.part or self.section]
            source = f"a second copy of {self.mm_prefix}{rule.alias}" if rule.alias else rule.hf.describe(prefix)
            kind = rule.kind if rule.kind != "param" else None
            notes = "".join(f" [{note}]" for note in (rule.when, kind, rule.hold) if note)
            shard = SHARD_NAMES.get(rule.shard, str(rule.shard))
            rows.append((self.mm_prefix + rule.mm + notes, source, f"({', '.join(rule.shape)})", shard))
        return rows


def pieces_fault(shape: Shape, pieces: list[Piece]) -> str | None:
    """Prove that pieces cover the Megatron tensor and each of their sources exactly once; None, or what is wrong."""
    if fault := partition_fault(shape, [(piece.to, piece.extent) for piece in pieces]):
        return fault
    by_source: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_source.setdefault(piece.source, []).append(piece)
    for name, group in by_source.items():
        if {(p.shape, p.view) for p in group} != {(group[0].shape, group[0].view)} or volume(group[0].shape) != volume(
            group[0].view
        ):
            return f"{name}: shapes differ between pieces"
        if fault := partition_fault(group[0].view, [(piece.at, piece.extent) for piece in group]):
            return f"{name}: {fault}"
    return None
