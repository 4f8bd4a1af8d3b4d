"""What the multi-process cases share: assembling a rank's chunks with Hugging Face's weights, and comparing gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mm_models.config.model import ModelConfig
from mm_models.device import prepare
from mm_models.layout import ParallelLayout
from mm_models.mcore.assembly import build_chunks, init_parallel, named_tensors
from tests.mcore.oracle import fill, megatron_tensors, model_config, shard


def assemble(
    hf, *, dtype: torch.dtype = torch.float32, split: dict | None = None, extra: dict | None = None, **degrees
):
    """(chunks, model, layout) of this rank, filled from the Hugging Face model `hf`. A case may do it again with the same degrees."""
    prepare()
    model = model_config(hf.config, **(extra or {}))
    layout = ParallelLayout.for_world(dist.get_world_size(), **degrees)
    stages = model.split(layout, **(split or {}))
    if not parallel_state.model_parallel_is_initialized():
        init_parallel(layout, stages, timeout_minutes=1)
    chunks = build_chunks(model, layout, stages, dtype=dtype)
    whole = model_config(hf.config)
    fill(
        named_tensors(chunks),
        megatron_tensors(hf.state_dict(), whole),
        layout.coords(dist.get_rank()),
        layout,
        whole,
    )
    return chunks, model, layout


def relative_gradients(hf, chunks, model: ModelConfig, layout: ParallelLayout, rank: int) -> dict[str, float]:
    """Per tensor of this rank ‖Δ‖ / max(‖g‖, 1e-6 · global norm) against Hugging Face's gradients (zero where it has none)."""
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in hf.named_parameters()}
    norm = torch.cat([g.flatten().double() for g in grads.values()]).norm()
    whole = megatron_tensors(grads, model)
    coords, errors = layout.coords(rank), {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            source = name if name in whole else "text_decoder.embedding.word_embeddings.weight"
            expected = shard(source, whole[source], coords, layout, model).double()
            got = getattr(parameter, "main_grad", None)
            got = parameter.grad if got is None else got
            got = torch.zeros_like(expected) if got is None else got.double()
            errors[name] = ((got - expected).norm() / max(expected.norm(), 1e-6 * norm)).item()
    return errors


def wrap(chunks: list, *, local: bool = False) -> list:
    """Core's DDP around each chunk, gradients summed in fp32; or, `local`, the wrapper of a rank without data-parallel peers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from mm_models.mcore.local_grads import LocalGradients

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if local:
        return [LocalGradients(chunk, ddp) for chunk in chunks]
    return [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]


def train_step(chunks: list, batches: list[dict], layout: ParallelLayout) -> list[torch.Tensor]:
    """One step of core's schedule over this rank's micro-batches, gradients finalised; the summed losses on the last stage."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from mm_models.mcore import grads

    def forward_step(iterator, chunk):
        output = chunk(next(iterator))
        return output, lambda loss: (loss, torch.ones((), dtype=torch.int), loss.detach().clone())

    chunks[0].module.config.finalize_model_grads_func = grads.finalize
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if layout.vpp > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
    )
