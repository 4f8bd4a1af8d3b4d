"""From a Hugging Face class and a family's list of replacements to a training model with our components inside.

`Assembly` is data, one per family, under its `model_id` in the registry table `models`. `build` makes Hugging Face's class on the
meta device, in fp32 and without initialisation, and puts our module in the place of each listed class. Names and shapes of
parameters and buffers stay Hugging Face's. A model leaves the meta device through `materialise`, never through `to_empty` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mm_models.errors import UserError
from mm_models.ops import Chosen


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every replacement may use: the chosen ops, whether experts run grouped, their layout, and their dispatcher."""

    ops: Chosen
    grouped: bool = True
    expert_layout: str = "stacked_hf"
    dispatch: str = "alltoall"


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """`build(module, config, context)` gives the module for every module of class `hf_class` (by name); children come replaced.

    `config` is the Hugging Face configuration of the nearest module around it. `at`: only the module of this qualified name.
    """

    hf_class: str
    build: Callable[[nn.Module, Any, Context], nn.Module]
    at: str | None = None

    def fits(self, name: str, module: nn.Module) -> bool:
        return type(module).__name__ == self.hf_class and self.at in (None, name)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """One family. `hf_class` is "package:Class"; `tied` is (head, embedding), the same parameter where the config ties them."""

    model_id: str
    hf_class: str
    replace: tuple[Replacement, ...]
    tied: tuple[str, str] = ("lm_head", "model.language_model.embed_tokens")


def build(
    assembly: Assembly,
    hf_config: Mapping[str, Any],
    *,
    ops: Chosen,
    device: torch.device | str = "meta",
    grouped: bool = True,
    expert_layout: str = "stacked_hf",
    dispatch: str = "alltoall",
) -> nn.Module:
    """The model of `hf_config` (the content of config.json): fp32, on `device`, its values not set but for frequency buffers."""
    package, name = assembly.hf_class.split(":")
    hf_class = getattr(importlib.import_module(package), name)
    config = _config(hf_class.config_class, hf_config)
    with torch.device("meta"), importlib.import_module("transformers.initialization").no_init_weights():
        model = hf_class(config).float()
        context = Context(ops=ops, grouped=grouped, expert_layout=expert_layout, dispatch=dispatch)
        model.replaced = dict(_replace(model, assembly, context))
    model.train()
    head, embedding = (model.get_submodule(part) for part in assembly.tied)
    model.tied = (head, embedding) if config.tie_word_embeddings else None
    tie(model)
    if torch.device(device).type != "meta":
        materialise(model, device)
    return model


def _config(config_class: type, hf_config: Mapping[str, Any]) -> Any:
    config = config_class.from_dict(dict(hf_config))
    config._attn_implementation = "sdpa"
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = torch.float32
        if getattr(part, "attention_dropout", 0.0):
            raise UserError(
                f"config.json {part.model_type}.attention_dropout is {part.attention_dropout}, expected 0: no kernel here drops attention."
            )
    return config


def _replace(model: nn.Module, assembly: Assembly, context: Context) -> Iterable[tuple[str, tuple[str, str]]]:
    """Replace from the leaves up; yields (qualified name, (Hugging Face's class, ours))."""
    unused = set(range(len(assembly.replace)))
    modules = dict(model.named_modules())
    for name, module in sorted(modules.items(), key=lambda item: -item[0].count(".") if item[0] else 1):
        for index, replacement in enumerate(assembly.replace):
            if not replacement.fits(name, module):
                continue
            unused.discard(index)
            new = replacement.build(module, _config_around(modules, name), context)
            if name:
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, new)
            yield name, (replacement.hf_class, type(new).__name__)
            break
    if unused:
        names = [assembly.replace[index].hf_class for index in sorted(unused)]
        raise RuntimeError(f"{assembly.hf_class} has no module of class {', '.join(names)} to replace in this release.")


def _config_around(modules: dict[str, nn.Module], name: str) -> Any:
    while not hasattr(modules[name], "config"):
        name = name.rpartition(".")[0]
    return modules[name].config


def tie(model: nn.Module) -> None:
    """Make head and embedding one parameter where the model ties them."""
    if model.tied is not None:
        head, embedding = model.tied
        head.weight = embedding.weight


def materialise(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Give a meta model storage on `device` (uninitialised), tie it again, and compute the buffers no checkpoint holds."""
    model.to_empty(device=device)
    tie(model)
    rebuild_buffers(model)
    return model


def rebuild_buffers(model: nn.Module) -> None:
    """Compute every non-persistent buffer anew, where it is. `to_empty` leaves them undefined and no checkpoint holds them."""
    for name, module in model.named_modules():
        if not module._non_persistent_buffers_set:
            continue
        if not hasattr(module, "rebuild_buffers"):
            raise RuntimeError(
                f"nobody can compute the buffers {sorted(module._non_persistent_buffers_set)} of {name}."
            )
        module.rebuild_buffers(next(module.buffers()).device)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by its Hugging Face name; a tied head appears once, as the embedding."""
    skip = {
        f"{name}.{buffer}" if name else buffer
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
    }
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name not in skip)
    return dict((*model.named_parameters(), *buffers))


def freeze(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Stop the gradient of the named modules and parameters; the names of all frozen parameters. Refused when none is left."""
    parameters = dict(model.named_parameters())
    for name in names:
        found = [parameters[name]] if name in parameters else list(model.get_submodule(name).parameters())
        for parameter in found:
            parameter.requires_grad_(False)
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if len(frozen) == len(parameters):
        raise UserError("model.freeze freezes every parameter: nothing would be trained. Narrow the patterns.")
    return frozen
