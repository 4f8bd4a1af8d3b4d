"""The start of a run: the model from the assembly to its shards, and what is printed before the first step."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from mm_models.config.fsdp2.features import Features
from mm_models.fsdp2 import assembly, sharding
from mm_models.fsdp2.features import determinism, offload, recompute
from mm_models.fsdp2.features.stores import PinnedStore, SpillFileStore
from mm_models.fsdp2.optimizer import Optimizer
from mm_models.fsdp2.session import Session
from mm_models.fsdp2.validation import RunPlan
from mm_models.ops import choose
from mm_models.registry import table
from mm_models.train import log
from mm_models.weights import model_map

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


def make_deterministic(plan: RunPlan) -> list[str]:
    """Deterministic mode where it is asked for, before the first collective; lines to print."""
    return determinism.enable(plan.platform) if plan.config.training.use_deter_comp else []


def build(session: Session) -> torch.nn.Module:
    """The model of the plan, sharded, with storage on the device; values are undefined but for the buffers no checkpoint holds.

    Wrapping goes from the inside out: what trains, what is recomputed, what is offloaded, then groups of parameters.
    """
    plan = session.plan
    config = plan.config
    model = assembly.build(
        table("models").get(config.model.model_id),
        plan.hf_config,
        ops=choose(session.device.type),
        grouped=config.model.use_grouped_expert_matmul,
        expert_layout=plan.expert_layout,
        dispatch=config.parallel.ep_plan.dispatcher,
    )
    assembly.freeze(model, plan.plans.freeze)
    _cut_loss(model, config.features)
    recompute.apply(model, plan.plans.recompute, use_reentrant=config.features.recompute_plan.use_reentrant)
    if plan.plans.offload:
        store = SpillFileStore() if session.device.type == "cpu" else PinnedStore(session.device)
        offload.apply(model, plan.plans.offload, store)
    sharding.shard(model, session.meshes, fsdp=plan.plans.fsdp, ep=plan.plans.ep, policy=_policy(plan))
    return assembly.materialise(model, session.device)


def _cut_loss(model: torch.nn.Module, features: Features) -> None:
    """Let the head compute the loss in chunks where that is asked for."""
    head = model.get_submodule(features.chunkloss_plan.apply_module)
    if features.enable_chunk_loss:
        head.chunk = features.chunkloss_plan.chunk_size
    if features.enable_dynamic_chunk_loss:
        head.total_chunk = features.chunkloss_plan.total_chunk_size


def _policy(plan: RunPlan) -> sharding.Policy:
    asked = plan.config.parallel.fsdp_plan
    return sharding.Policy(
        param_dtype=DTYPES[asked.param_dtype],
        reduce_dtype=DTYPES[asked.reduce_dtype],
        output_dtype=DTYPES[asked.output_dtype],
        reshard_after_forward=asked.reshard_after_forward,
        forward_prefetch=asked.num_to_forward_prefetch,
        backward_prefetch=asked.num_to_backward_prefetch,
        cpu_offload=asked.cpu_offload,
        ignored=plan.plans.ignored,
    )


def frozen_parts(plan: RunPlan, optimizer: Optimizer) -> frozenset[str]:
    """The sections of the model (vision_encoder, ...) of which nothing trains."""
    trained = {piece.name for piece in optimizer.pieces}
    tensors = model_map.build(plan.model, plan.family.prefixes).hf(plan.expert_layout)
    sections = {name: tensor.section for name, tensor in tensors.items()}
    return frozenset(sections.values()) - {sections[name] for name in trained}


def report(session: Session, model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Print the table of ranks and which parameters have no weight decay. Collective over the world."""
    trained = sum(piece.master.numel() for piece in optimizer.pieces)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    row = (session.rank, str(session.device), *_places(session), _experts(session), trained, held)
    found: list = [None] * session.world
    torch.distributed.all_gather_object(found, row)
    training = session.plan.config.training
    exempt = optimizer.undecayed
    log.say(
        session.rank,
        "rank  device     replicate,shard  copy,ep_fsdp,ep  experts   trains (elements)     holds (elements)",
        *(
            f"{rank:>4}  {device:<9}  {dense:<15}  {spread:<15}  {experts:<8}  {trains:>17,}  {holds:>19,}"
            for rank, device, dense, spread, experts, trains, holds in found
        ),
        f"AdamW: {'one fused kernel' if optimizer.fused else 'torch operations'} "
        f"(training.adam_fused {str(training.adam_fused).lower()})",
        *log.decay_lines(training.weight_decay, len(optimizer.pieces) - len(exempt), exempt),
    )


def _places(session: Session) -> tuple[str, str]:
    """This rank's coordinates on the meshes of dense parameters and of experts."""
    sizes, rank = session.plan.sizes, session.rank
    dense = rank // sizes.shard, rank % sizes.shard
    experts = rank // (sizes.ep * sizes.ep_fsdp), rank // sizes.ep % sizes.ep_fsdp, rank % sizes.ep
    return ",".join(map(str, dense)), ",".join(map(str, experts))


def _experts(session: Session) -> str:
    text = session.plan.model.text
    if text is None or not text.num_moe_experts:
        return "-"
    count = text.num_moe_experts // session.plan.sizes.ep
    return f"{session.ep_rank * count}-{(session.ep_rank + 1) * count - 1}"
