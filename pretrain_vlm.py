"""Train a vision-language model on megatron-core: `torchrun pretrain_vlm.py --mm-model model.json --mm-data data.json ...`.

The five callbacks of the field over the training loop in `mm_models.mcore.training`. Which model it is stands in model.json
alone; nothing here knows one. `--help` lists the flags; nothing heavy is imported before they are parsed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mm_models.train.entry import run_script

if TYPE_CHECKING:
    import torch

    from mm_models.train.batches import MicroBatch


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int = 0) -> torch.nn.Module:
    """Virtual chunk `vp_stage` of this rank's pipeline stage. The two flags say whether it is the first or last of the whole pipeline."""
    from mm_models.mcore.assembly import build_chunk
    from mm_models.mcore.session import current

    session = current()
    plan = session.plan
    chunk = build_chunk(plan.model, plan.layout, plan.split, chunk=vp_stage, dtype=session.dtype, device=session.device)
    assert (chunk.pre_process, chunk.post_process) == (pre_process, post_process)
    return chunk


def get_batch(data_iterator: Iterator[MicroBatch]) -> MicroBatch:
    """The next micro-batch of this chunk, already on the device, with what its loss is divided by."""
    return next(data_iterator)


def loss_func(
    batch: MicroBatch, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, 0, report). The loss carries its final factor: core and DDP only sum after it, so core's token count is not used."""
    import torch

    loss = batch.loss(output_tensor)
    return loss, torch.tensor(0, dtype=torch.int), {"lm loss": loss.detach()}


def forward_step(data_iterator: Iterator[MicroBatch], model: torch.nn.Module):
    """One forward pass of one chunk: what it sends on (the summed loss on the last), and the function that scales it."""
    from mm_models.mcore.session import current

    batch = get_batch(data_iterator)
    current().position.at(
        "forward and backward" if model.training else "evaluating",
        micro_batch=batch.index,
        chunk=getattr(model.module, "vp_stage", None),
    )
    return model(batch.data), partial(loss_func, batch)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: tuple[int, int, int], *, consumed_samples: int = 0, needs: frozenset[str]
):
    """(train, valid, None): a loader of endless micro-batches for this data-parallel rank, from `consumed_samples` on; and that of
    the validation split, each `iter` of it from its first sample, or None without `--eval-interval`."""
    from mm_models.data.loader import build_loader
    from mm_models.mcore.arguments import option
    from mm_models.mcore.session import current
    from mm_models.train.evaluation import open_split

    session = current()
    plan, args = session.plan, session.plan.args
    build = partial(
        build_loader,
        plan.data,
        model_config=plan.model,
        dp_rank=session.coords.dp,
        dp_size=plan.layout.dp,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        seed=args.seed,
        needs=needs,
        pad_to_multiple_of=plan.layout.tp if args.sequence_parallel else 1,
    )
    train = build(consumed_samples=consumed_samples)
    return train, open_split(build, plan.data, option=option) if args.eval_interval else None, None


def main() -> None:
    """Run and return nothing; raises what went wrong."""
    from mm_models.mcore.arguments import parse

    args = parse(sys.argv[1:])  # before the heavy imports: --help and typing errors answer at once
    from mm_models.mcore.training import pretrain

    pretrain(train_valid_test_datasets_provider, model_provider, forward_step, args)


if __name__ == "__main__":
    sys.exit(run_script(main))
