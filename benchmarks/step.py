"""Step time and peak memory of training: the Megatron target against Hugging Face, side by side in the same processes.

    python -m benchmarks.step                    # one process, 2 threads: plain Hugging Face training
    python -m benchmarks.step --processes 2      # two processes, 1 thread each: Hugging Face under DistributedDataParallel

Both sides train the same GLM-4.5V (fp32, about 110 M parameters) on the same micro-batches: forward, backward, gradient norm and clip,
fused AdamW. Steps alternate A B B A; every pair is printed, then the median ratio. Peak RSS is that of a process that ran one side alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.harness import run
from tests.mcore.batches import batch, hf_inputs
from tests.mcore.oracle import model_config
from tests.models import tiny_glm_model

SIZE = dict(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    n_routed_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, vocab_size=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]},
    depth=4, vision_hidden_size=256, vision_num_heads=4, vision_image_size=336, vision_out_hidden_size=512, vision_intermediate_size=704,
)  # fmt: skip
RATE, CLIP = 1e-5, 1.0
DATA = (
    Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "data.json"
)  # read, not used: micro-batches are made here


class HuggingFace:
    """Plain training of the stock model; under DDP with more than one process."""

    def __init__(self, folder: Path, processes: int):
        from transformers import Glm4vMoeForConditionalGeneration

        self.model = Glm4vMoeForConditionalGeneration.from_pretrained(folder).train()
        self.wrapped = torch.nn.parallel.DistributedDataParallel(self.model) if processes > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)

    def step(self, data: dict) -> float:
        self.optimizer.zero_grad()
        loss = self.wrapped(**hf_inputs(data), labels=data["labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.item()


class Megatron:
    """The training stack of `pretrain_vlm.py`, from process groups to AdamW."""

    def __init__(self, folder: Path, processes: int):
        from mm_models.mcore import optimizer, schedule_lr, session, start, validation
        from mm_models.mcore.arguments import Arguments
        from mm_models.mcore.assembly import build_chunks, named_tensors
        from mm_models.mcore.step import prepare_chunks
        from mm_models.weights.live import load_into

        args = Arguments(
            mm_model=str(folder / "model.json"), mm_data=str(DATA), micro_batch_size=1, train_iters=1000, lr=RATE,
            lr_decay_style="constant", weight_decay=0.01, clip_grad=CLIP, load=str(folder),
        )  # fmt: skip
        self.session = session.start(validation.plan(args, processes))
        plan = self.session.plan
        bare = build_chunks(plan.model, plan.layout, plan.split)
        load_into(named_tensors(bare), folder, model=plan.model, layout=plan.layout, coords=self.session.coords)
        self.chunks = start.wrap(bare, args, plan.layout)
        prepare_chunks(self.chunks)
        self.optimizer = optimizer.build(args, self.chunks)
        self.scheduler = schedule_lr.build(plan, self.optimizer)
        self.pieces = optimizer.shards(self.optimizer, self.chunks)

    def step(self, data: dict) -> float:
        from mm_models.mcore.step import train_step
        from mm_models.train.batches import gather_step
        from pretrain_vlm import forward_step

        batches = gather_step(
            iter([data | {"sample_ids": [0]}]), count=1, loss_type="default", counts=True, device=torch.device("cpu")
        )
        return train_step(
            self.session, self.chunks, self.optimizer, self.scheduler, self.pieces, batches, forward_step
        ).loss


SIDES = {"hf": HuggingFace, "megatron": Megatron}


def prepare(folder: Path) -> None:
    """The model as a Hugging Face folder with its model.json, everything trainable."""
    model = tiny_glm_model(0, **SIZE)
    model.save_pretrained(folder)
    (folder / "model.json").write_text(model_config(model.config).model_dump_json(exclude_none=True))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", flush=True)


def case(
    rank: int, sides: list[str], folder: str, processes: int, pairs: int
) -> tuple[list[list[float]], list[float], float]:
    """Times of each side per pair, the last losses, and this process's peak RSS in MiB."""
    torch.set_num_threads(2 if processes == 1 else 1)
    runners = [SIDES[side](Path(folder), processes) for side in sides]
    data = batch(rank, images=[[(16, 16)]], length=256)
    times, losses = [[] for _ in runners], [0.0] * len(runners)
    order = list(range(len(runners)))
    for number in range(pairs + 1):
        for at in order if number % 2 == 0 else reversed(order):
            torch.distributed.barrier()
            start = time.perf_counter()
            losses[at] = runners[at].step(data)
            if number:  # the first pair warms up
                times[at].append(time.perf_counter() - start)
    return times, losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(2 // args.processes)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        times, losses, _ = run(case, args.processes, list(SIDES), folder, args.processes, args.pairs, timeout=900)[0]
        print("losses of the last step: " + ", ".join(f"{side} {loss:.6f}" for side, loss in zip(SIDES, losses)))
        for hf, ours in zip(*times):
            print(f"hf {hf:.3f} s   megatron {ours:.3f} s   ratio {ours / hf:.3f}")
        print(f"median step: hf {statistics.median(times[0]):.3f} s, megatron {statistics.median(times[1]):.3f} s")
        print(f"median ratio over {args.pairs} pairs: {statistics.median(o / h for h, o in zip(*times)):.3f}")
        for side in SIDES:
            peak = max(
                result[2] for result in run(case, args.processes, [side], folder, args.processes, 2, timeout=900)
            )
            print(f"peak RSS of a process with {side} alone: {peak:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
