"""The start of a run: chunks from the entry script's provider, their wrapping, and what is printed before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mm_models.config.model import ModelConfig
from mm_models.layout import ModelSplit, ParallelLayout
from mm_models.mcore import assembly, rank_table
from mm_models.mcore import optimizer as optim
from mm_models.mcore.arguments import Arguments
from mm_models.mcore.grads import EMBEDDING, HEAD
from mm_models.mcore.layers import Recompute
from mm_models.mcore.local_grads import LocalGradients
from mm_models.mcore.session import Session
from mm_models.mcore.validation import RunPlan
from mm_models.ops import choose
from mm_models.train import log
from mm_models.weights import model_map


def build(session: Session, model_provider: Callable) -> list[torch.nn.Module]:
    """This rank's virtual chunks, unfilled, with the recompute choice set."""
    split: ModelSplit = session.plan.split
    chunks = []
    for chunk in range(session.layout.vpp):
        flat = split.flat(session.coords.pp, chunk)
        model = model_provider(pre_process=flat == 0, post_process=flat == split.flat_stages - 1, vp_stage=chunk)
        model.set_recompute(_recompute(session.plan.args))
        chunks.append(model)
    return chunks


def _recompute(args: Arguments) -> Recompute:
    """Megatron's flags as a block's choice: `uniform` recomputes every layer, `block` the first n of each stage."""
    layers = args.recompute_num_layers if args.recompute_method == "block" else None
    return Recompute(granularity=args.recompute_granularity, layers=layers)


def wrap(chunks: Sequence[torch.nn.Module], args: Arguments, layout: ParallelLayout) -> list[torch.nn.Module]:
    """Core's DDP around each chunk: gradients summed in fp32 at the end of a step. A rank without data-parallel peers needs none."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    if LocalGradients.suits(chunks, layout, config):
        return [LocalGradients(chunk, config) for chunk in chunks]
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=place > 0)
        for place, chunk in enumerate(chunks)
    ]


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model below core's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of this rank by its global name, wrapped or not."""
    return assembly.named_tensors([unwrap(chunk) for chunk in chunks])


def replicated(tensors: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """`tensors` with both copies of a tied weight under one name, so that they are compared with each other."""
    if not model.tied or HEAD not in tensors or EMBEDDING in tensors:
        return dict(tensors)
    return {EMBEDDING if name == HEAD else name: tensor for name, tensor in tensors.items()}


def plan_lines(plan: RunPlan) -> list[str]:
    """The resolved configuration and the layout, printed once."""
    layout = plan.layout
    lines = log.configuration_lines(plan.args.as_dict(), "arguments")
    lines += [f"model.json: {plan.model.model_dump_json(exclude_none=True)}", *plan.notes]
    lines += [
        f"layout: {layout.world} processes = tp {layout.tp} · pp {layout.pp} · dp {layout.dp}; "
        f"vpp {layout.vpp}, ep {layout.ep}, etp {layout.etp}, expert dp {layout.edp}; split: {plan.split.describe()}",
        f"batches: global {plan.global_batch_size} = micro {plan.args.micro_batch_size} · dp {layout.dp} · "
        f"{plan.num_microbatches} micro-batches; loss {plan.loss_type}",
    ]
    return lines


def report(session: Session, chunks: Sequence[torch.nn.Module]) -> None:
    """Print the table of ranks, what is frozen and why. Collective over the world."""
    frozen = sorted(name for chunk in chunks for name, p in chunk.named_parameters() if not p.requires_grad)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    row = rank_table.RankRow(
        rank=session.rank,
        stage=session.coords.pp,
        tp=session.coords.tp,
        dp=session.coords.dp,
        ep=session.coords.ep,
        holds=rank_table.holdings(session.plan.split, session.coords.pp),
        experts=_experts(session),
        trains=sum(p.numel() for p in parameters if p.requires_grad),
        total=sum(p.numel() for p in parameters),
    )
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (row, frozen))
    log.say(
        session.rank,
        choose(session.device.type).describe(),
        *rank_table.rank_table(row for row, _ in found),
        *_freeze_lines(session.plan, {name for _, names in found for name in names}),
    )


def _experts(session: Session) -> str:
    text = session.plan.model.text
    if text is None or not text.num_moe_experts:
        return "-"
    count = text.num_moe_experts // session.layout.ep
    return f"{session.coords.ep * count}-{(session.coords.ep + 1) * count - 1}"


def check_freeze(plan: RunPlan) -> None:
    """Refuse a freeze pattern that matches nothing in the whole model."""
    names = [name for name, tensor in model_map.build(plan.model).tensors.items() if tensor.kind == "param"]
    assembly.check_freeze_patterns(plan.model, names)


def _freeze_lines(plan: RunPlan, frozen: set[str]) -> list[str]:
    from mm_models.config.model import FREEZE_DEFAULTS

    parts = {
        "vision_encoder": plan.model.vision,
        "vision_projector": plan.model.projector,
        "text_decoder": plan.model.text,
    }
    lines = []
    for name, choice in assembly.freeze_choices(plan.model).items():
        default = " (the default; model.json does not say)" if parts[name].freeze is None else ""
        assert not default or choice == FREEZE_DEFAULTS[name]
        lines.append(f"freeze {name}: {choice}{default}")
    shown = sorted(frozen)
    return lines + [f"frozen: {len(shown)} parameters" + "".join(f"\n  {name}" for name in shown)]


def report_decay(session: Session, pieces: Sequence[optim.Shard], optimizer) -> None:
    """Print which parameters have no weight decay. Collective over the world."""
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(
        found, (optim.no_decay(pieces, optimizer), sorted({piece.name for piece in pieces}))
    )
    exempt = sorted({name for names, _ in found for name in names})
    trained = {name for _, names in found for name in names}
    log.say(
        session.rank,
        *log.decay_lines(session.plan.args.weight_decay, len(trained) - len(exempt), exempt),
    )
