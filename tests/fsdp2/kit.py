"""The tiny GLM-4.5V on the FSDP2 target: built, sharded and filled from a Hugging Face model; and Hugging Face's answer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mm_models.fsdp2 import assembly, mesh, sharding
from mm_models.fsdp2.shards import shard_of
from mm_models.ops import choose
from mm_models.registry import table

LAYERS = "model.language_model.layers"


def build(hf: nn.Module, **options) -> nn.Module:
    """The assembled model of a Hugging Face model's config; `options` as in `assembly.build`."""
    return assembly.build(table("models").get("glm4v_moe"), hf.config.to_dict(), ops=choose("cpu"), **options)


def plan(model: nn.Module) -> list[str]:
    """The seeds' `fsdp_plan`, resolved."""
    blocks = [f"model.visual.blocks.{i}" for i in range(len(model.model.visual.blocks))]
    layers = [f"{LAYERS}.{i}" for i in range(len(model.model.language_model.layers))]
    embedding = "model.language_model.embed_tokens"
    return ["model.visual", *blocks, "model.language_model", embedding, *layers, "lm_head"]


def experts(model: nn.Module) -> list[str]:
    """The seeds' `ep_plan`, resolved."""
    return [name for name, _ in model.named_modules() if name.endswith(".mlp.experts")]


def fill(model: nn.Module, state: dict[str, torch.Tensor], *, stacked: bool = False) -> None:
    """Write this rank's part of every tensor from whole Hugging Face tensors; names and shapes must be equal.

    `stacked`: the model holds its experts transposed.
    """
    for name, tensor in assembly.named_tensors(model).items():
        whole = state[name]
        if stacked and ".experts." in name:
            whole = whole.transpose(1, 2)
        box = shard_of(tensor)
        assert tuple(whole.shape) == box.shape, (name, whole.shape, box.shape)
        where = tuple(slice(start, start + size) for start, size in zip(box.start, box.local.shape))
        with torch.no_grad():
            box.local.copy_(whole[where])


def assemble(
    hf: nn.Module, *, shard: int | None = None, ep: int = 1, ep_fsdp: int | None = None, ep_plan: bool = True,
    policy: sharding.Policy = sharding.Policy(), freeze=(), **options,
) -> nn.Module:  # fmt: skip
    """Built on meta, sharded over this world, materialised and filled with the values of `hf`."""
    model = build(hf, **options)
    assembly.freeze(model, freeze)
    sizes = mesh.Sizes.of(dist.get_world_size(), shard=shard, ep=ep, ep_fsdp=ep_fsdp)
    meshes = mesh.make(sizes, "cpu")
    sharding.shard(model, meshes, fsdp=plan(model), ep=experts(model) if ep_plan else (), policy=policy)
    assembly.materialise(model, "cpu")
    fill(model, hf.state_dict(), stacked=options.get("expert_layout") == "stacked")
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter or gradient. A collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
