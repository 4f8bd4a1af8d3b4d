"""What a model consists of, without its weights: names and shapes, from the assembly on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_models.ops import choose
from mm_models.registry import table


@dataclass(frozen=True, kw_only=True)
class Outline:
    """`modules` in the order of the model; `parameters` and `buffers` by Hugging Face name with their shapes; `tied` maps the
    second name of a parameter to its first; `head` is the module that makes logits."""

    modules: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    head: str

    def parameters_of(self, module: str) -> dict[str, tuple[int, ...]]:
        """The parameters inside `module`, or the one of that name; a tied one under its first name."""
        inside = [name for name in (*self.parameters, *self.tied) if name == module or name.startswith(f"{module}.")]
        return {first: self.parameters[first] for name in inside for first in [self.tied.get(name, name)]}


def outline(model_id: str, hf_config: Mapping[str, Any], *, platform: str, expert_layout: str) -> Outline:
    """The outline of the assembly `model_id` made with `hf_config`."""
    from mm_models.fsdp2.assembly import build

    model = build(
        table("models").get(model_id),
        hf_config,
        ops=choose(platform),
        device="meta",
        expert_layout=expert_layout,
    )
    head = model.get_output_embeddings()
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return Outline(
        modules=tuple(name for name, _ in model.named_modules() if name),
        parameters={name: tuple(p.shape) for name, p in model.named_parameters()},
        buffers={name: tuple(b.shape) for name, b in model.named_buffers()},
        tied={name: first[id(p)] for name, p in every if first[id(p)] != name},
        head=next(name for name, module in model.named_modules() if module is head),
    )
