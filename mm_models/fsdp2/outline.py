"""What a model consists of, without its weights: names and shapes, from the assembly on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_models.ops import choose
from mm_models.registry import table


@dataclass(frozen=True, kw_only=True)
class Outline:
    """`modules` in the order of the model; `parameters` and persistent `buffers` by Hugging Face name with their shapes; `head`
    is the module that makes logits."""

    modules: tuple[str, ...]
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    head: str

    def parameters_of(self, module: str) -> dict[str, tuple[int, ...]]:
        """The parameters inside `module`."""
        return {name: shape for name, shape in self.parameters.items() if name.startswith(f"{module}.")}


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
    return Outline(
        modules=tuple(name for name, _ in model.named_modules() if name),
        parameters={name: tuple(p.shape) for name, p in model.named_parameters()},
        buffers={name: tuple(b.shape) for name, b in model.named_buffers()},
        head=next(name for name, module in model.named_modules() if module is head),
    )
