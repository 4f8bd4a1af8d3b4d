"""Operators and their variants: which implementation of an op runs on which hardware, chosen once for a model.

An id of the registry's table `ops` is "name/variant". The variant "torch" defines the op and runs everywhere; any other is named
after the hardware it needs ("npu", "cuda") and is tested against the definition. `choose` makes the choice for a device: what the
user asked for must exist there, else it is an error; everything else falls back to the definition, and `Chosen.describe` says so.
Bound per model through the backend provider: there is no module-level switch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from mm_models.errors import UserError, unknown_name
from mm_models.registry import table

REFERENCE = "torch"


@dataclass(frozen=True, kw_only=True)
class Op:
    """One implementation: `rms_norm` for `npu`, say. `load` imports it."""

    name: str
    variant: str

    @property
    def hardware(self) -> str | None:
        """The device type it needs; None for the definition, which runs everywhere."""
        return None if self.variant == REFERENCE else self.variant

    def load(self) -> Callable:
        return table("ops").get(f"{self.name}/{self.variant}")


def known() -> dict[str, list[str]]:
    """Op -> its variants."""
    found: dict[str, list[str]] = {}
    for id in table("ops").ids():
        name, variant = id.split("/")
        found.setdefault(name, []).append(variant)
    return found


@dataclass(frozen=True)
class Chosen:
    """One `Op` for every name."""

    ops: dict[str, Op]

    def __getitem__(self, name: str) -> Callable:
        if name not in self.ops:
            raise unknown_name("op", name, self.ops)
        return self.ops[name].load()

    def describe(self) -> str:
        """Which variant of each op runs, for the start of a run."""
        return "ops: " + ", ".join(f"{name} {op.variant}" for name, op in sorted(self.ops.items()))


def choose(device: str, fused: Collection[str] = ()) -> Chosen:
    """The variants for `device` ("cpu", "cuda", "npu"). `fused` names the ops whose fused variant the user insists on."""
    variants = known()
    for name in fused:
        if name not in variants:
            raise unknown_name("op", name, variants)
    missing = sorted(name for name in fused if device not in variants[name])
    if missing:
        raise UserError(
            f"no fused variant of {', '.join(missing)} exists on {device}; the torch definition runs there. Drop the flag."
        )
    return Chosen(
        {name: Op(name=name, variant=device if device in there else REFERENCE) for name, there in variants.items()}
    )
