"""Hugging Face against the Megatron target on one topology: the cases `demo.py` runs on fresh processes.

Each process loads the Hugging Face folder straight into its shard of the model, runs megatron-core's own schedule over real
micro-batches, and compares logits and summed loss with Hugging Face's model in the same process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mm_models.config.data import load_data_config
from mm_models.config.model import load_model_config
from mm_models.data.loader import build_loader
from mm_models.device import prepare
from mm_models.layout import ParallelLayout
from mm_models.mcore.assembly import build_chunks, init_parallel, named_tensors
from mm_models.weights.live import load_into

MICRO_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One row of the proof: how many processes, which degrees, which layers where."""

    name: str
    processes: int = 1
    dtype: torch.dtype = torch.float32
    degrees: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Without tensor parallelism the arithmetic is the same, so every bit must be."""
        return self.degrees.get("tp", 1) == 1


def compare(rank: int, topology: Topology, paths: dict[str, str]) -> dict[str, Any]:
    """On this rank: were logits bit-equal, the worst relative difference, and both losses. Empty off the last stage."""
    prepare()
    torch.set_num_threads(1)
    model = load_model_config(paths["model"])
    layout = ParallelLayout.for_world(dist.get_world_size(), **topology.degrees)
    split = model.split(layout, **topology.split)
    init_parallel(layout, split, timeout_minutes=2)
    chunks = build_chunks(model, layout, split, dtype=topology.dtype)
    coords = layout.coords(rank)
    cast = (
        topology.dtype != torch.float32
    )  # the quickstart's folder is fp32; from_pretrained(dtype=) casts the same way
    load_into(named_tensors(chunks), paths["hf"], model=model, layout=layout, coords=coords, split=split, cast=cast)
    batches = micro_batches(paths, model, equal=layout.ep > 1)
    mine = batches[coords.dp :: layout.dp]
    with torch.no_grad():
        logits = forward(chunks, [without_labels(batch) for batch in mine], layout)
        losses = forward(chunks, mine, layout)
        return (
            report(logits, losses, batches, mine, layout, coords, hugging_face(paths["hf"], topology.dtype))
            if logits
            else {}
        )


def micro_batches(paths: dict[str, str], model, *, equal: bool) -> list[dict]:
    """Real samples from the data set. `equal` cuts all to one length: expert-parallel ranks are compared on their joined batch."""
    loader = build_loader(
        load_data_config(paths["data"]),
        model_config=model,
        micro_batch_size=1,
        global_batch_size=1,
        pad_to_multiple_of=2,
    )
    stream = iter(loader)
    batches = [batch for batch in (next(stream) for _ in range(3 * MICRO_BATCHES)) if "image_grid_thw" in batch][
        :MICRO_BATCHES
    ]
    if equal:
        length = min(batch["input_ids"].shape[1] for batch in batches)
        batches = [{key: cut(key, value, length) for key, value in batch.items()} for batch in batches]
    return [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]


def cut(key: str, value, length: int):
    return value[..., :length] if key in ("input_ids", "labels", "position_ids", "attention_mask") else value


def without_labels(batch: dict) -> dict:
    return {key: value for key, value in batch.items() if key != "labels"}


def forward(chunks: list, batches: list[dict], layout: ParallelLayout) -> list[torch.Tensor]:
    """What the last stage computes for each micro-batch, through core's schedule; nothing on other stages."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    def step(iterator, chunk):
        return chunk(next(iterator)), lambda output, non_loss_data: output

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if layout.vpp > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )


def hugging_face(folder: str, dtype: torch.dtype):
    """The stock model, as users load it, with the attention and experts it uses by default."""
    from transformers import Glm4vMoeForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    return Glm4vMoeForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()


def hugging_face_logits(model, batches: list[dict]) -> torch.Tensor:
    """Logits (B, S, V) of `batches` joined along the batch axis."""
    inputs = {
        key: torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "pixel_values", "image_grid_thw")
    }
    inputs["position_ids"] = torch.cat([batch["position_ids"] for batch in batches], dim=1)
    kinds = (inputs["input_ids"] == model.config.image_token_id).int()
    return model(**inputs, mm_token_type_ids=kinds, use_cache=False).logits


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hugging Face's cross entropy before it is divided: logits (1, S, V), labels (1, S) not shifted."""
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), shifted.view(-1), reduction="sum"
    )


def report(logits, losses, batches, mine, layout, coords, model) -> dict[str, Any]:
    equal, worst, ours, theirs = True, 0.0, 0.0, 0.0
    for at, (got, loss, batch) in enumerate(zip(logits, losses, mine)):
        joined = batches[at * layout.dp : (at + 1) * layout.dp] if layout.ep > 1 else [batch]
        expected = hugging_face_logits(model, joined)[coords.dp if layout.ep > 1 else 0][None]
        reference = summed_loss(expected, batch["labels"])
        part = expected.chunk(layout.tp, -1)[coords.tp].transpose(0, 1)
        equal = equal and torch.equal(got, part) and (layout.tp > 1 or torch.equal(loss, reference))
        worst = max(worst, ((got - part).float().abs().max() / part.float().abs().max()).item())
        ours, theirs = ours + loss.item(), theirs + reference.item()
    return {"equal": equal, "worst": worst, "ours": ours, "theirs": theirs}
