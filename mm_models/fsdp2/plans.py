"""The plans of the file resolved against a model: which module is a group, an expert, recomputed, offloaded, frozen.

A plan whose switch is off is resolved all the same, so that a wrong name shows, and then left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mm_models.config import patterns
from mm_models.config.fsdp2 import RunConfig
from mm_models.errors import UserError
from mm_models.fsdp2.outline import Outline


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Module names in the order of the model; `freeze` holds names of parameters. A feature that is off has no names."""

    fsdp: tuple[str, ...]
    ignored: tuple[str, ...]
    ep: tuple[str, ...]
    recompute: tuple[str, ...]
    offload: tuple[str, ...]
    freeze: tuple[str, ...]
    parameters: int
    """How many parameters the model has, frozen ones included."""

    def lines(self) -> list[str]:
        """What each plan holds, with counts."""
        words = {
            "sharded": self.fsdp,
            "not sharded": self.ignored,
            "experts": self.ep,
            "recomputed": self.recompute,
            "offloaded": self.offload,
        }
        lines = [f"plan: {len(names)} modules {what}: {_short(names)}" for what, names in words.items() if names]
        trained = f"{len(self.freeze)} of {self.parameters} parameters frozen"
        return [*lines, f"plan: {trained}{': ' + _short(self.freeze) if self.freeze else ''}"]


def resolve_plans(config: RunConfig, shape: Outline) -> Plans:
    """Every plan of `config` against the names of `shape`."""
    parallel, features = config.parallel, config.features

    def modules(names: Sequence[str], where: str) -> tuple[str, ...]:
        return tuple(patterns.resolve(names, shape.modules, where))

    fsdp = modules(parallel.fsdp_plan.apply_modules, "parallel.fsdp_plan.apply_modules")
    ignored = modules(parallel.fsdp_plan.ignored_modules, "parallel.fsdp_plan.ignored_modules")
    if empty := [name for name in fsdp if not shape.parameters_of(name)]:
        raise UserError(
            f"parallel.fsdp_plan.apply_modules: {empty[0]} has no parameters: there is nothing to shard. Leave it out."
        )
    if both := [name for name in fsdp if name in ignored]:
        raise UserError(f"parallel.fsdp_plan: {both[0]} is in apply_modules and in ignored_modules. Keep one.")
    ep = modules(parallel.ep_plan.apply_modules, "parallel.ep_plan.apply_modules")
    _check_are_experts(ep, shape)
    recompute = modules(features.recompute_plan.apply_modules, "features.recompute_plan.apply_modules")
    offload = modules(features.activation_offload_plan.apply_modules, "features.activation_offload_plan.apply_modules")
    return Plans(
        fsdp=fsdp,
        ignored=ignored,
        ep=ep,
        recompute=recompute if features.recompute else (),
        offload=offload if features.enable_activation_offload else (),
        freeze=_frozen(config.model.freeze, shape),
        parameters=len(shape.parameters),
    )


def _check_are_experts(names: Sequence[str], shape: Outline) -> None:
    for name in names:
        own = shape.parameters_of(name)
        if not own or any(len(size) != 3 for size in own.values()):
            raise UserError(
                f"parallel.ep_plan.apply_modules: {name} holds no stacked experts (parameters of three dimensions, experts first): "
                f"{', '.join(own) or 'it has no parameters'}. Name modules such as {_experts_of(shape)}."
            )


def _experts_of(shape: Outline) -> str:
    holders = dict.fromkeys(name.rsplit(".", 1)[0] for name, size in shape.parameters.items() if len(size) == 3)
    return next(iter(holders), "none: this model has no experts")


def _frozen(names: Sequence[str], shape: Outline) -> tuple[str, ...]:
    """Names of the parameters that `model.freeze` stands for: named themselves, or inside a named module."""
    every = [*shape.modules, *shape.parameters, *shape.tied]
    patterns.resolve(names, every, "model.freeze")
    found: set[str] = set()
    for pattern in names:
        own = [name for one in patterns.resolve([pattern], every, "model.freeze") for name in shape.parameters_of(one)]
        if not own:
            raise UserError(f"model.freeze: {pattern!r} names modules without parameters: nothing to freeze. Drop it.")
        found.update(own)
    if len(found) == len(shape.parameters):
        raise UserError("model.freeze: every parameter is frozen, nothing would train. Leave some out.")
    return tuple(name for name in shape.parameters if name in found)


def _short(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]}"
