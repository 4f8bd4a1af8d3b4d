"""Which rank holds what: experts over `ep`, every named module its own FSDP group, bottom up, and the root for the rest.

Gradients are summed, never averaged: every group has divide factor 1 and forced sums (any other factor needs an operation that
gloo and HCCL lack, and is wrong on a mesh of size 1); the loss carries the whole factor. Forward inputs are never cast, since the
vision tower's fp32 cos and sin would be. Axes of size 1 are not wrapped: one process that computes in fp32 keeps plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mm_models.components.moe import Experts, Router
from mm_models.errors import UserError
from mm_models.fsdp2.experts import MoE
from mm_models.fsdp2.mesh import Meshes
from mm_models.fsdp2.prefetch import Prefetch


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a sharded model computes. dtypes None mean fp32; parameters are fp32 in any case, and so are the routers.

    `output_dtype` is that of the whole model's output (logits; the loss is fp32 anyway). `forward_prefetch` and
    `backward_prefetch`: how many groups ahead are gathered. `ignored`: names of modules that every rank holds whole.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    cpu_offload: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Nothing is asked for that needs a wrapper on one process."""
        fp32 = (None, torch.float32)
        return self.param_dtype in fp32 and self.output_dtype in fp32 and not self.cpu_offload


def shard(
    model: nn.Module, meshes: Meshes, *, fsdp: Collection[str] = (), ep: Collection[str] = (), policy: Policy = Policy()
) -> nn.Module:
    """Shard `model`, best while it is on meta. `fsdp` and `ep` are names of modules; an experts module named in both is sharded
    as `ep` says: dimension 0 over the expert-parallel ranks, dimension 1 over `ep_fsdp`. Returns `model`.

    Refused: names in `ep` that are no experts, experts and widths that do not divide, expert parallel without names.
    """
    sizes = meshes.sizes
    _check(model, ep, sizes)
    if sizes.world == 1 and policy.plain:
        return model
    if sizes.ep > 1:
        for name in ep:
            _spread(model, name, meshes)
    ignored = {p for name in policy.ignored for p in model.get_submodule(name).parameters()}
    groups = dict.fromkeys((*fsdp, *ep))
    if not policy.plain:  # one group has one dtype, and routers stay in fp32
        groups |= dict.fromkeys(name for name, module in model.named_modules() if isinstance(module, Router))
    apart = _holders_of_tied(model)
    for name in sorted(groups, key=lambda name: -name.count(".")):
        module = model.get_submodule(name)
        if name and module not in apart and not all(p in ignored for p in module.parameters()):
            _wrap(module, meshes, policy, experts=name in ep, ignored=ignored)
    _wrap(model, meshes, policy, root=True, ignored=ignored)
    for module in _groups(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    Prefetch(forward=policy.forward_prefetch, backward=policy.backward_prefetch).watch(model)
    return model


def _check(model: nn.Module, ep: Collection[str], sizes) -> None:
    if sizes.ep > 1 and not ep:
        raise UserError(f"expert_parallel_size is {sizes.ep}, but ep_plan names no module. Name the experts there.")
    for name in ep:
        module = model.get_submodule(name)
        if not isinstance(module, Experts):
            raise UserError(f"ep_plan names {name!r}, a {type(module).__name__}; expected a module of stacked experts.")
        for parameter, tensor in module.named_parameters():
            if tensor.shape[0] % sizes.ep:
                raise UserError(f"{name}.{parameter}: {tensor.shape[0]} experts do not divide by {sizes.ep} ranks.")
            if tensor.shape[1] % sizes.ep_fsdp:
                raise UserError(
                    f"{name}.{parameter} {tuple(tensor.shape)}: dimension 1 does not divide by the {sizes.ep_fsdp} ranks of "
                    "expert_fully_shard_parallel_size."
                )


def _spread(model: nn.Module, name: str, meshes: Meshes) -> None:
    """Give this rank its experts, and tell the block around them the group."""
    experts, block = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    assert isinstance(block, MoE), f"{name} stands in a {type(block).__name__}"
    for key, whole in dict(experts.named_parameters()).items():
        mine = whole.detach().chunk(meshes.sizes.ep)[meshes.ep.get_local_rank()].clone()
        split = DTensor.from_local(mine, meshes.ep, [Shard(0)], run_check=False)
        setattr(experts, key, nn.Parameter(split, requires_grad=whole.requires_grad))
    block.ep_group = meshes.ep_group


def _holders_of_tied(model: nn.Module) -> set[nn.Module]:
    """Modules that may be no group of their own because a tied parameter stands in them or directly below.

    Both uses of one parameter must be in one group. A group [embedding, head] would reduce the gradient when the head's backward
    ends, before the embedding's share is there; the root's gradients are reduced at the very end. So both belong to the root, and
    so does whatever else their common path holds directly.
    """
    if model.tied is None:
        return set()
    head, embedding = model.tied
    return {module for module in model.modules() if module in (head, embedding) or embedding in module.modules()}


def _wrap(
    module: nn.Module, meshes: Meshes, policy: Policy, *, experts: bool = False, root: bool = False, ignored: set
) -> None:
    reduced = isinstance(module, Router) or policy.param_dtype == torch.float32
    fully_shard(
        module,
        mesh=meshes.experts if experts else meshes.dense,
        # None on the root: its parameters are needed again at once.
        reshard_after_forward=None if root else policy.reshard_after_forward,
        shard_placement_fn=(lambda _: Shard(1)) if experts else None,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if reduced else policy.param_dtype,
            reduce_dtype=policy.reduce_dtype or torch.float32,  # None would be param_dtype
            output_dtype=policy.output_dtype if root else None,
            cast_forward_inputs=False,
        ),
        offload_policy=_offload() if policy.cpu_offload else OffloadPolicy(),
        ignored_params=ignored or None,
    )


def _offload() -> CPUOffloadPolicy:
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())


def _groups(model: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """After a forward that no backward follows: every group keeps its shards alone."""
    for module in _groups(model):
        module.reshard()


def exchange_gradients(model: nn.Module, now: bool) -> None:
    """Before a micro-batch: whether its backward exchanges gradients; where it does not, each rank adds up its own, whole."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
