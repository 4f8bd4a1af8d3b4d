"""Step time and peak memory of training, all sides in one go: Hugging Face, the Megatron target, the FSDP2 target.

    python -m benchmarks.train_step                    # both parts, then memory
    python -m benchmarks.train_step --processes 2      # one part alone

One process, 2 threads: plain Hugging Face training against both targets. Two processes, 1 thread each: the Megatron target against
Hugging Face under DistributedDataParallel, the FSDP2 target against the unmodified Hugging Face module under the same `fully_shard`
plan. All sides train the same GLM-4.5V (fp32, about 109 M parameters, 512 tokens with one image) on the same micro-batch: forward,
backward, gradient norm and clip, fused AdamW. The order of the sides turns round with every round; ratios are medians over rounds.
Peak RSS is that of a process that ran one side alone; with chunked loss and recompute beside what they should save.
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

from tests.fsdp2.kit import plan as fsdp_plan
from tests.harness import run
from tests.mcore.batches import batch, hf_inputs
from tests.mcore.oracle import model_config
from tests.models import tiny_glm_model

SIZE = dict(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    n_routed_experts=32, num_experts_per_tok=4, moe_intermediate_size=240, vocab_size=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]},
    depth=8, vision_hidden_size=256, vision_num_heads=4, vision_image_size=336, vision_out_hidden_size=512, vision_intermediate_size=704,
)  # fmt: skip
TOKENS, GRID = 512, (16, 16)
RATE, CLIP = 1e-5, 1.0
DATA = (
    Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "data.json"
)  # read, not used: batches are made here


class HuggingFace:
    """Plain training of the stock model. `ddp`, `fsdp`: under that wrapper of torch's."""

    def __init__(self, folder: Path, wrapper: str | None = None):
        from transformers import Glm4vMoeForConditionalGeneration

        self.model = Glm4vMoeForConditionalGeneration.from_pretrained(folder).train()
        self.wrapped = self.model
        if wrapper == "ddp":
            self.wrapped = torch.nn.parallel.DistributedDataParallel(self.model)
        if wrapper == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for name in sorted(fsdp_plan(self.model), key=lambda name: -name.count(".")):
                fully_shard(self.model.get_submodule(name))
            fully_shard(self.model)
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

    def __init__(self, folder: Path):
        from mm_models.mcore import optimizer, schedule_lr, session, start, validation
        from mm_models.mcore.arguments import Arguments
        from mm_models.mcore.assembly import build_chunks, named_tensors
        from mm_models.mcore.step import prepare_chunks
        from mm_models.weights.live import load_into

        args = Arguments(
            mm_model=str(folder / "model.json"), mm_data=str(DATA), micro_batch_size=1, train_iters=1000, lr=RATE,
            lr_decay_style="constant", weight_decay=0.01, clip_grad=CLIP, load=str(folder),
        )  # fmt: skip
        self.session = session.start(validation.plan(args, torch.distributed.get_world_size()))
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
        from pretrain_vlm import forward_step

        return train_step(
            self.session, self.chunks, self.optimizer, self.scheduler, self.pieces, gathered(data), forward_step
        ).loss


class Fsdp2:
    """The training stack of `pretrain_fsdp2.py`, from the YAML to AdamW."""

    def __init__(self, folder: Path, *overrides: str):
        from mm_models.config.fsdp2 import load_config
        from mm_models.fsdp2 import session, training, validation

        config = load_config(folder / "fsdp2.yaml", overrides)
        plan = validation.plan(config, torch.distributed.get_world_size(), "cpu")
        self.trainer, _ = training.set_up(session.start(plan))

    def step(self, data: dict) -> float:
        from mm_models.fsdp2.step import train_step

        trainer = self.trainer
        return train_step(trainer.session, trainer.model, trainer.optimizer, gathered(data), rate=RATE, flops=0).loss


SIDES = {
    "hf": HuggingFace,
    "hf ddp": lambda folder: HuggingFace(folder, "ddp"),
    "hf fsdp": lambda folder: HuggingFace(folder, "fsdp"),
    "megatron": Megatron,
    "fsdp2": Fsdp2,
    "fsdp2, chunked loss": lambda folder: Fsdp2(
        folder, "features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=64"
    ),
    "fsdp2, recompute": lambda folder: Fsdp2(folder, "features.recompute=true"),
}
RATIOS = {  # processes -> (ours, theirs, bound)
    1: (("megatron", "hf", 1.0), ("fsdp2", "hf", 1.0)),
    2: (("megatron", "hf ddp", 1.05), ("fsdp2", "hf fsdp", 1.0)),
}


def gathered(data: dict):
    from mm_models.train.batches import gather_step

    batches = iter([data | {"sample_ids": [0]}])
    return gather_step(batches, count=1, loss_type="default", counts=True, device=torch.device("cpu"))


def prepare(folder: Path) -> None:
    """The model as a Hugging Face folder with its model.json and its YAML, everything trainable."""
    model = tiny_glm_model(0, **SIZE)
    model.save_pretrained(folder)
    (folder / "model.json").write_text(model_config(model.config).model_dump_json(exclude_none=True))
    plan = "\n".join(f"      - {name}" for name in fsdp_plan(model))
    (folder / "fsdp2.yaml").write_text(YAML.format(folder=folder, plan=plan))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", flush=True)


YAML = """
parallel:
  fsdp_plan:
    apply_modules:
{plan}
data:
  dataset_param:
    preprocess_parameters: {{model_name_or_path: {folder}}}
    basic_parameters: {{template: glm4v_moe, dataset: {folder}/config.json}}
  dataloader_param:
    collate_param: {{collator_id: glm4v_moe}}
model:
  model_id: glm4v_moe
  model_name_or_path: {folder}
features:
  recompute_plan:
    apply_modules:
      - model.visual.blocks.{{*}}
      - model.language_model.layers.{{*}}
training:
  lr: 1.0e-5
  weight_decay: 0.01
  train_iters: 1000
  clip_grad: 1.0
  load: {folder}
  load_format: hf
  no_load_optim: true
  no_load_rng: true
  save: null
"""


def case(
    rank: int, sides: list[str], folder: str, processes: int, rounds: int
) -> tuple[list[list[float]], list[float], float]:
    """Times of each side per round, the last losses, and this process's peak RSS in MiB."""
    torch.set_num_threads(2 if processes == 1 else 1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what the targets say at start
    runners = [SIDES[side](Path(folder)) for side in sides]
    data = batch(rank, images=[[GRID]], length=TOKENS)
    times, losses = [[] for _ in runners], [0.0] * len(runners)
    order = list(range(len(runners)))
    for number in range(rounds + 1):
        for at in order if number % 2 == 0 else reversed(order):
            torch.distributed.barrier()
            start = time.perf_counter()
            losses[at] = runners[at].step(data)
            if number:  # the first round warms up
                times[at].append(time.perf_counter() - start)
    return times, losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(folder: str, processes: int, rounds: int) -> None:
    sides = list(dict.fromkeys(side for pair in RATIOS[processes] for side in (pair[1], pair[0])))
    os.environ["OMP_NUM_THREADS"] = str(2 // processes)
    times, losses, _ = run(case, processes, sides, folder, processes, rounds, timeout=1500)[0]
    measured = dict(zip(sides, times))
    print(f"\n{processes} process{'es' if processes > 1 else ''}, {2 // processes} thread(s) each, {rounds} rounds")
    for side, loss in zip(sides, losses):
        low, middle, high = min(measured[side]), statistics.median(measured[side]), max(measured[side])
        print(f"  {side:10} {middle:.3f} s a step ({low:.3f} to {high:.3f}), last loss {loss:.6f}")
    for ours, theirs, bound in RATIOS[processes]:
        ratios = [a / b for a, b in zip(measured[ours], measured[theirs])]
        print(
            f"  {ours} / {theirs}: {statistics.median(ratios):.3f} (bound {bound}; {min(ratios):.3f} to {max(ratios):.3f})"
        )


def memory(folder: str, processes: int) -> None:
    """Peak RSS of each side alone."""
    sides = ["hf", "megatron", "fsdp2", "fsdp2, chunked loss", "fsdp2, recompute"]
    if processes == 2:
        sides = ["hf ddp", "hf fsdp", "megatron", "fsdp2"]
    for side in sides:
        peak = max(result[2] for result in run(case, processes, [side], folder, processes, 2, timeout=900))
        print(f"  peak RSS of a process with {side} alone: {peak:.0f} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, choices=(1, 2), help="one part alone")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for processes in (args.processes,) if args.processes else (1, 2):
            compare(folder, processes, args.rounds)
            if not args.no_memory:
                memory(folder, processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
