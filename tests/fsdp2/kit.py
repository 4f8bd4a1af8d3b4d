"""The tiny models on the FSDP2 target: built, sharded and filled from a Hugging Face model; and Hugging Face's own answers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mm_models.fsdp2 import assembly, grads, mesh, sharding
from mm_models.fsdp2.shards import shard_of
from mm_models.ops import choose
from mm_models.registry import table
from tests.mcore.batches import batch, hf_sum_loss

LAYERS = "model.language_model.layers"
BF16 = sharding.Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS = {
    "one": (1, {}),
    "fsdp2": (2, {}),
    "fsdp2-experts-inside": (2, {"ep_plan": False}),
    "ep2": (2, {"ep": 2}),
    "fsdp4": (4, {}),
    "hsdp2x2": (4, {"shard": 2}),
    "ep4": (4, {"ep": 4}),
    "ep2-fsdp2": (4, {"ep": 2}),
    "ep2-hsdp": (4, {"ep": 2, "shard": 2}),
}
"""Name -> (processes, arguments of `assemble`)."""


def build(hf: nn.Module, **options) -> nn.Module:
    """The assembled model of a Hugging Face model's config; `options` as in `assembly.build`."""
    return assembly.build(table("models").get(hf.config.model_type), hf.config.to_dict(), ops=choose("cpu"), **options)


def plan(model: nn.Module) -> list[str]:
    """The seeds' `fsdp_plan`, resolved."""
    blocks = [f"model.visual.blocks.{i}" for i in range(len(model.model.visual.blocks))]
    layers = [f"{LAYERS}.{i}" for i in range(len(model.model.language_model.layers))]
    embedding = "model.language_model.embed_tokens"
    return ["model.visual", *blocks, "model.language_model", embedding, *layers, "lm_head"]


def experts(model: nn.Module) -> list[str]:
    """The seeds' `ep_plan`, resolved; nothing in a dense model."""
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


def plain(hf: nn.Module, **options) -> nn.Module:
    """Unsharded, on the CPU, with the values of `hf`."""
    model, state = build(hf, device="cpu", **options), hf.state_dict()
    with torch.no_grad():
        for name, tensor in assembly.named_tensors(model).items():
            stacked = options.get("expert_layout") == "stacked" and ".experts." in name
            tensor.copy_(state[name].transpose(1, 2) if stacked else state[name])
    return model


def assemble(
    hf: nn.Module,
    *,
    shard: int | None = None,
    ep: int = 1,
    ep_fsdp: int | None = None,
    ep_plan: bool = True,
    fsdp_plan: list[str] | None = None,
    policy: sharding.Policy | None = None,
    freeze=(),
    **options,
) -> nn.Module:
    """Built on meta, sharded over this world, materialised and filled with the values of `hf`."""
    model = build(hf, **options)
    assembly.freeze(model, freeze)
    meshes = mesh.make(mesh.Sizes.of(dist.get_world_size(), shard=shard, ep=ep, ep_fsdp=ep_fsdp), "cpu")
    sharding.shard(
        model,
        meshes,
        fsdp=plan(model) if fsdp_plan is None else fsdp_plan,
        ep=experts(model) if ep_plan else (),
        policy=policy or sharding.Policy(),
    )
    assembly.materialise(model, "cpu")
    fill(model, hf.state_dict(), stacked=options.get("expert_layout") == "stacked")
    return model


def global_batch() -> list[dict]:
    """Four micro-batches of one length: three with images of different sizes, the second without."""
    images = [[(4, 4)]], [[]], [[(4, 6)]], [[(2, 8), (4, 4)]]
    return [batch(20 + i, images=kind, length=44) for i, kind in enumerate(images)]


def mine(data: list[dict]) -> list[dict]:
    """This rank's micro-batches of a global batch, in steps of the world size."""
    return data[dist.get_rank() :: dist.get_world_size()]


def joined(data: list[dict]) -> dict:
    """Micro-batches of one length as one batch."""
    keys = dict.fromkeys(key for part in data for key in part)
    out = {key: torch.cat([part[key] for part in data if key in part]) for key in keys if key != "position_ids"}
    return out | {"position_ids": torch.cat([part["position_ids"] for part in data], dim=1)}


def backward(model: nn.Module, data: list[dict], factor: float = 1.0) -> torch.Tensor:
    """Forward and backward of this rank's micro-batches as one step; the sum of their losses, gradients completed."""
    total = torch.zeros(())
    for index, part in enumerate(data):
        sharding.exchange_gradients(model, index == len(data) - 1)
        loss = model(part) * factor
        loss.backward()
        total += loss.detach()
    grads.fill_missing(model)
    return total


def reference(hf: nn.Module, data: list[dict], factor: float = 1.0) -> tuple[float, dict[str, torch.Tensor], float]:
    """(loss, gradient of every trained parameter, its norm) of plain Hugging Face autograd over a global batch."""
    hf.zero_grad()
    total = 0.0
    for part in data:
        loss = hf_sum_loss(hf, part)[1] * factor
        loss.backward()
        total += loss.item()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in hf.named_parameters()
        if p.requires_grad
    }
    return total, found, norm_of(found)


def norm_of(found: dict[str, torch.Tensor]) -> float:
    return sum(g.double().pow(2).sum() for g in found.values()).sqrt().item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter or gradient. A collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients of what is trained, by name. A collective."""
    return {name: whole(p.grad).detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def relative(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """‖Δ‖ / max(‖expected‖, 1e-6 · global norm) of each; the names must be equal."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    floor = 1e-6 * norm_of(expected)
    return {name: ((got[name] - e).norm() / max(e.norm(), floor)).item() for name, e in expected.items()}


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest error and whose it is."""
    return max((error, name) for name, error in errors.items())
