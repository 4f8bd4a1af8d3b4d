"""The one place that knows ranks, pipeline stages, virtual chunks and where each layer lives.

`ParallelLayout` holds the degrees and turns a rank into coordinates, in megatron-core's order: dense ranks count
`tp, cp, dp, pp` from the fastest, expert ranks re-slice the same ranks as `etp, ep, edp, pp`. `StageSplit` says how many
layers of one module each flat stage holds; `ModelSplit` joins the vision and the text split and answers who owns what.

Flat order is chunk-major: `flat = chunk * pp + stage`. The vision tower comes first: no text layer stands before the last
vision layer. Final norm, head and loss stand on the last flat stage even when it holds no layer.

Refused, with the numbers: degrees below one, a world that does not divide, wrong lengths or sums of `pipeline_num_layers`,
a text layer before the last vision layer, dimensions that do not divide by TP, EP or ETP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mm_models.errors import UserError

MODULES = ("vision", "text")
PLACES = ("vision_first", "vision_last", "text_first", "text_last")


@dataclass(frozen=True, kw_only=True)
class Coords:
    """Where one rank stands on the dense grid (tp, cp, dp, pp) and on the expert grid (etp, ep, edp, pp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Parallel degrees. `etp` None means `tp`, as in megatron-core. `sequence_parallel` changes no checkpoint: no part of equality."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    sequence_parallel: bool = field(default=False, compare=False)

    def __post_init__(self):
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"layout: {name} must be an integer of at least 1, got {value!r}.")
        if self.vpp > 1 and self.pp == 1:
            raise UserError(f"layout: vpp {self.vpp} needs pp of at least 2, got pp 1. Drop vpp or raise pp.")

    def check_ranks(self) -> None:
        """Refuse EP·ETP that does not divide TP·CP·DP: expert ranks re-slice the ranks of one pipeline stage."""
        ranks, experts = self.tp * self.cp * self.dp, self.ep * self.etp
        if ranks % experts:
            raise UserError(
                f"layout: ep·etp = {self.ep}·{self.etp} = {experts} must divide tp·cp·dp = {self.tp}·{self.cp}·{self.dp} = {ranks}. "
                f"Expert ranks re-slice the ranks of one pipeline stage; raise dp, or lower ep or etp."
            )

    @classmethod
    def for_world(cls, world: int, **degrees) -> ParallelLayout:
        """The layout of `world` processes; dp is what remains."""
        one = cls(**degrees)
        model = one.tp * one.pp * one.cp
        if world % model:
            raise UserError(
                f"layout: {world} processes cannot be split into tp·pp·cp = {one.tp}·{one.pp}·{one.cp} = {model}. "
                f"Start a multiple of {model} processes."
            )
        layout = cls(**(degrees | {"dp": world // model}))
        layout.check_ranks()
        return layout

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Expert-data-parallel degree: how many ranks of a stage hold the same experts."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def separate_experts(self) -> bool:
        """Whether expert shards live on another grid than dense shards, and so in folders of their own."""
        return self.ep > 1 or self.etp != self.tp

    def coords(self, rank: int) -> Coords:
        """The coordinates of a global rank."""
        inner, pp = rank % (self.tp * self.cp * self.dp), rank // (self.tp * self.cp * self.dp)
        return Coords(
            tp=inner % self.tp,
            cp=inner // self.tp % self.cp,
            dp=inner // (self.tp * self.cp),
            pp=pp,
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
            edp=inner // (self.etp * self.ep),
        )

    def flags(self) -> str:
        """The `mm-convert` flags that reproduce this layout (dp is no property of a checkpoint)."""
        names = ("tp", "pp", "vpp", "cp", "ep")
        flags = [f"--{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        if self.etp != self.tp:
            flags.append(f"--etp {self.etp}")
        return " ".join(flags) or "--tp 1"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one flat stage holds of one module: global layer indices, and whether it is the module's first or last part."""

    layers: tuple[int, ...] = ()
    first: bool = False
    last: bool = False

    @property
    def empty(self) -> bool:
        return not (self.layers or self.first or self.last)


@dataclass(frozen=True)
class StageSplit:
    """Layer counts of one module: `rows[chunk][stage]`, every row `pp` long."""

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, value: object, *, pp: int, vpp: int, num_layers: int, what: str) -> StageSplit:
        """From `pipeline_num_layers`: `pp` counts, or one such list per virtual chunk. `what` names the module and key.

        A flat list of pp·vpp counts means the same as its vpp rows. None means a balanced split.
        """
        if value is None:
            return cls.balanced(num_layers, pp=pp, vpp=vpp)
        rows = _rows(value, what)
        if len(rows) == 1 and vpp > 1 and len(rows[0]) == pp * vpp:
            rows = [rows[0][i * pp : (i + 1) * pp] for i in range(vpp)]
        shown = [list(row) for row in rows]
        if len(rows) != vpp:
            raise UserError(
                f"{what}: got {len(rows)} list(s) {shown}, expected {vpp}: one per virtual chunk (vpp {vpp})."
            )
        for chunk, row in enumerate(rows):
            if len(row) != pp:
                raise UserError(
                    f"{what}: list {chunk} is {list(row)}, of length {len(row)}, expected {pp}: one count per pipeline stage (pp {pp})."
                )
        total = sum(map(sum, rows))
        if total != num_layers:
            raise UserError(
                f"{what}: {shown} sums to {total}, the model has {num_layers} layers (sum {total}, model {num_layers})."
            )
        return cls(tuple(tuple(row) for row in rows))

    @classmethod
    def balanced(cls, num_layers: int, *, pp: int, vpp: int) -> StageSplit:
        """Equal counts, the remainder to the last stages but one first (the last one also holds the head)."""
        flat = pp * vpp
        counts = [num_layers // flat] * flat
        for i in range(num_layers % flat):
            counts[flat - 2 - i] += 1
        return cls(tuple(tuple(counts[c * pp : (c + 1) * pp]) for c in range(vpp)))

    @classmethod
    def first_stage(cls, num_layers: int, *, pp: int, vpp: int) -> StageSplit:
        """Everything on flat stage 0: the default of a vision tower."""
        counts = [num_layers] + [0] * (pp * vpp - 1)
        return cls(tuple(tuple(counts[c * pp : (c + 1) * pp]) for c in range(vpp)))

    @property
    def pp(self) -> int:
        return len(self.rows[0])

    @property
    def vpp(self) -> int:
        return len(self.rows)

    @property
    def flat(self) -> tuple[int, ...]:
        """Counts in flat order (chunk-major, then stage)."""
        return tuple(count for row in self.rows for count in row)

    @property
    def num_layers(self) -> int:
        return sum(self.flat)

    def layers(self, stage: int, chunk: int = 0) -> tuple[int, ...]:
        """Global indices of the layers on (stage, chunk)."""
        at = chunk * self.pp + stage
        start = sum(self.flat[:at])
        return tuple(range(start, start + self.flat[at]))

    def locate(self, layer: int) -> tuple[int, int, int]:
        """(stage, chunk, local index) of a global layer."""
        start = 0
        for at, count in enumerate(self.flat):
            if layer < start + count:
                return at % self.pp, at // self.pp, layer - start
            start += count
        raise IndexError(f"layer {layer} of {self.num_layers}")

    def nested(self) -> list[list[int]]:
        """As plain lists, one per virtual chunk."""
        return [list(row) for row in self.rows]


def _rows(value: object, what: str) -> list[tuple[int, ...]]:
    """`[a, b]` or `[[a, b], [c, d]]` as rows of non-negative integers."""
    expected = "a list of layer counts, one per pipeline stage, or one such list per virtual chunk"
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"{what}: got {value!r}, expected {expected}.")
    nested = [isinstance(row, (list, tuple)) for row in value]
    if any(nested) and not all(nested):
        raise UserError(f"{what}: got {value!r}, which mixes numbers and lists; expected {expected}.")
    rows = [tuple(row) for row in value] if nested[0] else [tuple(value)]
    for row in rows:
        for count in row:
            if type(count) is not int or count < 0:
                raise UserError(f"{what}: got {count!r} in {value!r}, expected non-negative integers.")
    return rows


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """Both modules over the flat stages. A module that the model does not have is None."""

    vision: StageSplit | None
    text: StageSplit | None

    def __post_init__(self):
        if self.vision is None or self.text is None:
            return
        first_text = next((at for at, count in enumerate(self.text.flat) if count), len(self.text.flat))
        last_vision = self._last_vision
        if first_text < last_vision:
            raise UserError(
                f"pipeline_num_layers: a text layer stands on flat stage {first_text}, "
                f"before the last vision layer on flat stage {last_vision} "
                f"(vision {self.vision.nested()}, text {self.text.nested()}). "
                f"The vision tower must end first: move text layers later or vision layers earlier."
            )

    @property
    def any(self) -> StageSplit:
        """A split that exists: for `pp` and `vpp`."""
        return self.text or self.vision

    @property
    def flat_stages(self) -> int:
        return len(self.any.flat)

    @property
    def _last_vision(self) -> int:
        return max(at for at, count in enumerate(self.vision.flat) if count)

    def place(self, name: str) -> int | None:
        """The flat stage of a place (`vision_first`, `vision_last`, `text_first`, `text_last`); None if the module is absent."""
        assert name in PLACES, name
        module = self.vision if name.startswith("vision") else self.text
        if module is None:
            return None
        if name == "text_last":
            return self.flat_stages - 1
        held = [at for at, count in enumerate(module.flat) if count]
        return held[-1] if name == "vision_last" else held[0]

    def flat(self, stage: int, chunk: int = 0) -> int:
        return chunk * self.any.pp + stage

    def owner(self, flat: int) -> tuple[int, int]:
        """(stage, chunk) of a flat stage."""
        return flat % self.any.pp, flat // self.any.pp

    def stage(self, module: str, stage: int, chunk: int = 0) -> Stage:
        """What (stage, chunk) holds of `module` ("vision" or "text")."""
        split, flat = getattr(self, module), self.flat(stage, chunk)
        if split is None:
            return Stage()
        return Stage(
            layers=split.layers(stage, chunk),
            first=flat == self.place(f"{module}_first"),
            last=flat == self.place(f"{module}_last"),
        )

    def describe(self) -> str:
        """`vision [[2, 0]], text [[2, 2]]`: as the flags take it."""
        return ", ".join(f"{m} {getattr(self, m).nested()}" for m in MODULES if getattr(self, m) is not None)


def check_divides(pairs: Iterable[tuple[str, int, str, int]]) -> None:
    """Refuse every (what, size, degree name, degree) with size % degree != 0, all in one error, with the degrees that work."""
    wrong = [
        f"{what} {size} does not divide by {name} {degree} (possible: {_divisors(size)})"
        for what, size, name, degree in pairs
        if size % degree
    ]
    if wrong:
        raise UserError("layout: " + "; ".join(wrong) + ".")


def _divisors(size: int, most: int = 64) -> str:
    found: Sequence[int] = [d for d in range(1, min(size, most) + 1) if size % d == 0]
    return ", ".join(map(str, found))
