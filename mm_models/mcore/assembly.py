"""From model.json and a layout to the model chunks of this rank: process groups, core's configuration, modules."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch import nn

from mm_models.config.model import FREEZE_DEFAULTS, ModelConfig
from mm_models.errors import UserError, nearest
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.mcore.core_config import core_config
from mm_models.mcore.provider import Provider
from mm_models.mcore.vlm_model import VLMModel

PART_PREFIXES = {
    "vision_encoder": "image_encoder.encoder.",
    "vision_projector": "image_encoder.projector.",
    "text_decoder": "text_decoder.",
}


def init_parallel(layout: ParallelLayout, split: ModelSplit, *, timeout_minutes: int = 30) -> None:
    """Create core's process groups for a world that is joined. The embedding group follows the split, not core's guess."""
    first, last = split.place("text_first"), split.place("text_last")
    stages = [] if first is None else sorted({split.owner(first)[0], split.owner(last)[0]})

    def embedding_ranks(ranks: list[int], *_) -> list[int]:
        return [ranks[stage] for stage in stages] or [ranks[0]]

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        get_embedding_ranks=embedding_ranks,
    )


@contextlib.contextmanager
def building(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are on `device` and, where a module does not say otherwise, of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build_chunk(
    model: ModelConfig,
    layout: ParallelLayout,
    split: ModelSplit,
    *,
    chunk: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    stage: int | None = None,
) -> VLMModel:
    """Virtual chunk `chunk` of pipeline rank `stage` (default: this rank's), uninitialised, with freezing applied."""
    model.check_layout(layout)
    stage = parallel_state.get_pipeline_model_parallel_rank() if stage is None else stage
    config = core_config(model, layout, dtype=dtype)
    with building(device, dtype):
        built = VLMModel(
            model=model,
            layout=layout,
            split=split,
            stage=stage,
            chunk=chunk,
            config=config,
            provider=Provider(torch.device(device).type),
        )
    freeze([built], model)
    return built


def build_chunks(model: ModelConfig, layout: ParallelLayout, split: ModelSplit, **how) -> list[VLMModel]:
    """Every virtual chunk of a pipeline rank; `how` as in `build_chunk`."""
    return [build_chunk(model, layout, split, chunk=chunk, **how) for chunk in range(layout.vpp)]


def named_tensors(chunks: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of this rank by its Megatron name; a tied head held here appears once, as the embedding."""
    tensors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            assert name not in tensors, f"{name} stands in two chunks"
            tensors[name] = tensor
    return tensors


def freeze_choices(model: ModelConfig) -> dict[str, bool | list[str]]:
    """What `freeze` means for each part the model has, the field's defaults filled in."""
    parts = {"vision_encoder": model.vision, "vision_projector": model.projector, "text_decoder": model.text}
    return {
        name: FREEZE_DEFAULTS[name] if part.freeze is None else part.freeze
        for name, part in parts.items()
        if part is not None
    }


def freeze(chunks: list[nn.Module], model: ModelConfig) -> list[str]:
    """Stop the gradient of what model.json freezes; the names, sorted. A pattern is matched against names below the part (`*` and `?`)."""
    frozen = []
    for part, choice in freeze_choices(model).items():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                inside = name.removeprefix(PART_PREFIXES[part])
                if name != inside and _matches(inside, choice):
                    parameter.requires_grad_(False)
                    frozen.append(name)
    return sorted(frozen)


def check_freeze_patterns(model: ModelConfig, names: list[str]) -> None:
    """Refuse a freeze pattern that matches no parameter of the whole model. `names`: all Megatron parameter names."""
    for part, choice in freeze_choices(model).items():
        inside = [name.removeprefix(PART_PREFIXES[part]) for name in names if name.startswith(PART_PREFIXES[part])]
        for pattern in choice if isinstance(choice, list) else []:
            if not any(_matches(name, [pattern]) for name in inside):
                close = nearest(pattern, inside)
                raise UserError(
                    f"model.json {part}.freeze: pattern {pattern!r} matches no parameter; the nearest is {close!r}."
                )


def _matches(name: str, choice: bool | list[str]) -> bool:
    if isinstance(choice, bool):
        return choice
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in choice)
