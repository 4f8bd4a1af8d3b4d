"""The weight map of one model: the tables of its `model_id`s, made concrete.

`build(model)` looks up the ids of model.json in the table `weight_maps` and expands every rule to `GlobalTensor`s, so a
mixed model (this encoder, that decoder) has a map without another word. From it come: the shard every coordinate holds
(`WeightMap.local`), and the Hugging Face tensors with their placements (`WeightMap.hf`), in every expert layout.

Refused: a section without a weight table; sizes that do not divide. That every rule covers its tensor and its sources
exactly once is proven at build.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mm_models.config.model import ModelConfig
from mm_models.errors import UserError
from mm_models.layout import Coords, ModelSplit, ParallelLayout
from mm_models.registry import table
from mm_models.weights.boxes import Placement, Shape
from mm_models.weights.rules import (
    EXPERT_LAYOUTS,
    TRANSPOSED_LAYOUTS,
    Piece,
    Rule,
    Shard,
    Sizes,
    WeightTable,
    pieces_fault,
    shard_regions,
)

SECTIONS = ("vision_encoder", "vision_projector", "text_decoder")


@dataclass(frozen=True, kw_only=True)
class GlobalTensor:
    """One unsharded Megatron tensor, under its global name."""

    name: str
    shape: Shape
    place: str
    layer: int | None
    shard: Shard
    kind: str
    expert: bool
    hold: str | None
    init: str
    section: str
    model_id: str
    canonical: str
    """The tensor whose elements these are: itself, or for a tied head the embedding."""
    sources: Mapping[str, tuple[Piece, ...]] = field(repr=False)
    """Per Hugging Face expert layout, the pieces it is made of, with full Hugging Face names; of a second copy, the tensor that a
    folder may hold all the same."""

    @property
    def alias(self) -> bool:
        return self.canonical != self.name


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """The shard of a global tensor that one rank holds in virtual chunk `chunk`.

    `regions` say which boxes of the canonical global tensor it is.
    """

    name: str
    chunk: int
    shape: Shape
    regions: tuple[Placement, ...]
    tensor: GlobalTensor


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One Hugging Face tensor: its shape on disk, the view its placements speak of, and where its elements belong.

    With `transposed` the bytes on disk are those of the view with its last two dimensions swapped.
    """

    name: str
    shape: Shape
    view: Shape
    placements: tuple[Placement, ...]
    init: str
    section: str
    hold: str | None
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """All tensors of one model. `tensors` is ordered: vision, projector, text; first, layers, last."""

    model: ModelConfig
    tensors: Mapping[str, GlobalTensor]

    def global_tensors(self) -> Mapping[str, GlobalTensor]:
        return self.tensors

    def hf(self, expert_layout: str) -> dict[str, HfTensor]:
        """Every Hugging Face tensor of the model in one expert layout, by name.

        `stacked` (E, in, out) and `flat` (E·in, out) have the names of `stacked_hf` and, both, its bytes transposed.
        """
        if expert_layout in TRANSPOSED_LAYOUTS:
            experts = {piece.source for t in self.tensors.values() if t.expert for piece in t.sources["stacked_hf"]}
            return {
                name: _transposed(tensor, expert_layout) if name in experts else tensor
                for name, tensor in self.hf("stacked_hf").items()
            }
        return _hf_tensors((tensor for tensor in self.tensors.values() if not tensor.alias), expert_layout)

    def hf_copies(self) -> dict[str, HfTensor]:
        """Hugging Face tensors that a folder may hold beside the model's: the head of a tied model, its embedding again."""
        return _hf_tensors((tensor for tensor in self.tensors.values() if tensor.alias), "stacked_hf")

    @property
    def has_experts(self) -> bool:
        return any(tensor.expert for tensor in self.tensors.values())

    def flat_stage(self, tensor: GlobalTensor, split: ModelSplit) -> int | None:
        """The flat pipeline stage that holds `tensor`; None for a second copy that this split does not need."""
        if tensor.layer is not None:
            module = split.vision if tensor.place.startswith("vision") else split.text
            stage, chunk, _ = module.locate(tensor.layer)
            return split.flat(stage, chunk)
        flat = split.place(tensor.place)
        if tensor.alias and flat == self.flat_stage(self.tensors[tensor.canonical], split):
            return None
        return flat

    def local(
        self, coords: Coords, layout: ParallelLayout, split: ModelSplit, *, expert: bool | None = None
    ) -> dict[str, LocalTensor]:
        """Everything the rank at `coords` holds, over all its chunks, by global name.

        `expert` True or False restricts it to one grid: experts are told apart by (etp, pp, ep), the rest by (tp, pp).
        """
        degrees = {"tp": layout.tp, "ep": layout.ep, "etp": layout.etp}
        ranks = {"tp": coords.tp, "ep": coords.ep, "etp": coords.etp}
        found = {}
        for name, tensor in self.tensors.items():
            if expert is not None and tensor.expert != expert:
                continue
            flat = self.flat_stage(tensor, split)
            if flat is None:
                continue
            stage, chunk = split.owner(flat)
            if stage != coords.pp:
                continue
            shape, regions = shard_regions(tensor.canonical, tensor.shape, tensor.shard, degrees, ranks)
            found[name] = LocalTensor(name=name, chunk=chunk, shape=shape, regions=regions, tensor=tensor)
        return found


def _hf_tensors(tensors: Iterable[GlobalTensor], expert_layout: str) -> dict[str, HfTensor]:
    pieces: dict[str, list[tuple[GlobalTensor, Piece]]] = {}
    for tensor in tensors:
        for piece in tensor.sources.get(expert_layout, ()):
            pieces.setdefault(piece.source, []).append((tensor, piece))
    return {
        name: HfTensor(
            name=name,
            shape=group[0][1].shape,
            view=group[0][1].view,
            placements=tuple(Placement(t.canonical, p.to, p.at, p.extent) for t, p in group),
            init=group[0][0].init,
            section=group[0][0].section,
            hold=group[0][0].hold,
        )
        for name, group in pieces.items()
    }


def _transposed(tensor: HfTensor, expert_layout: str) -> HfTensor:
    experts, out, inner = tensor.shape
    shape = (experts, inner, out) if expert_layout == "stacked" else (experts * inner, out)
    return replace(tensor, shape=shape, transposed=True)


def shard_coords(*, tp: int = 0, pp: int = 0, etp: int = 0, ep: int = 0) -> Coords:
    """The coordinates of a shard on disk, which belongs to no particular data-parallel rank."""
    return Coords(tp=tp, cp=0, dp=0, pp=pp, etp=etp, ep=ep, edp=0)


def sections_of(model: ModelConfig) -> Iterator[tuple[str, object]]:
    """(section name, section) of every part the model has."""
    for name, config in zip(SECTIONS, (model.vision, model.projector, model.text)):
        if config is not None:
            yield name, config


def tables_of(model: ModelConfig) -> Iterator[tuple[WeightTable, object]]:
    """(weight table, section) of every part the model has, by `model_id`."""
    for name, config in sections_of(model):
        found = table("weight_maps").get(config.model_id)
        if found.section != name:
            raise UserError(f"model.json {name}.model_id {config.model_id!r} is a {found.section}, not a {name}.")
        yield found, config


def build(model: ModelConfig, prefixes: Mapping[str, str] | None = None) -> WeightMap:
    """The weight map of `model`. `prefixes` (part -> Hugging Face prefix) override the tables' own: a family's say."""
    tensors: dict[str, GlobalTensor] = {}
    for weight_table, config in tables_of(model):
        named = {**weight_table.hf_prefixes, **(prefixes or {})}
        for tensor in _expand(weight_table, config, named, tied=model.tied):
            assert tensor.name not in tensors, tensor.name
            tensors[tensor.name] = tensor
    for tensor in tensors.values():
        assert tensor.canonical in tensors, (tensor.name, tensor.canonical)
    return WeightMap(model=model, tensors=tensors)


def _expand(weight_table: WeightTable, config, prefixes: Mapping[str, str], *, tied: bool) -> Iterator[GlobalTensor]:
    sizes, features = weight_table.sizes(config), weight_table.features(config)
    features |= {"tied" if tied else "untied"}
    for rule in weight_table.rules:
        if "{layer}" not in rule.mm:
            if rule.when is None or rule.when in features:
                yield _make(weight_table, rule, sizes, prefixes, None)
            continue
        for layer in range(config.num_layers):
            if rule.when is None or rule.when in features or rule.when == weight_table.layer_kind(config, layer):
                yield _make(weight_table, rule, sizes, prefixes, layer)


def _make(
    weight_table: WeightTable, rule: Rule, sizes: Sizes, prefixes: Mapping[str, str], layer: int | None
) -> GlobalTensor:
    def named(prefix: str, name: str) -> str:
        return prefix + (name if layer is None else name.replace("{layer}", str(layer)))

    shape = tuple(sizes[size] for size in rule.shape)
    name = named(weight_table.mm_prefix, rule.mm)
    prefix = prefixes[rule.part or weight_table.section]
    sources = {}
    for expert_layout in EXPERT_LAYOUTS:
        pieces = list(rule.hf.pieces(shape, sizes, expert_layout))
        fault = pieces_fault(shape, pieces)
        assert fault is None, f"weight map {weight_table.model_id!r}, rule {rule.mm!r}: {fault}"
        sources[expert_layout] = tuple(
            Piece(named(prefix, p.source), p.shape, p.view, p.at, p.to, p.extent) for p in pieces
        )
    return GlobalTensor(
        name=name,
        shape=shape,
        place=rule.place,
        layer=layer,
        shard=rule.shard,
        kind=rule.kind,
        expert=rule.expert,
        hold=rule.hold,
        init=rule.init,
        section=weight_table.section,
        model_id=weight_table.model_id,
        canonical=name if rule.alias is None else weight_table.mm_prefix + rule.alias,
        sources=sources,
    )
