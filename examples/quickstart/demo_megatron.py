"""The demo's rows on the Megatron target: parity on every kind of topology, conversion chains, training, resume, resplit."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.quickstart.demo_kit import LOSS_BOUND, STEPS, Demo, command, distance, healthy, torchrun
from examples.quickstart.parity import Topology, compare

TENSOR_PARALLEL_BOUND = 1e-5
EP, SP = {"ep": 2}, {"tp": 2, "sequence_parallel": True}

TOPOLOGIES = (
    Topology(name="TP1"),
    Topology(name="TP1, bf16", dtype=torch.bfloat16),
    Topology(name="TP2·SP", processes=2, degrees=SP),
    Topology(
        name="PP2 (ViT 2+0, LLM 2+2)",
        processes=2,
        degrees={"pp": 2},
        split={"vision_layers": [2, 0], "text_layers": [2, 2]},
    ),
    Topology(
        name="PP2 (ViT 1+1, LLM 0+4)",
        processes=2,
        degrees={"pp": 2},
        split={"vision_layers": [1, 1], "text_layers": [0, 4]},
    ),
    Topology(
        name="PP2·VPP2",
        processes=2,
        degrees={"pp": 2, "vpp": 2},
        split={"vision_layers": [[1, 1], [0, 0]], "text_layers": [[0, 1], [2, 1]]},
    ),
    Topology(name="EP2", processes=2, degrees=EP),
    Topology(name="EP2, bf16", processes=2, degrees=EP, dtype=torch.bfloat16),
    Topology(name="TP2·EP2·SP", processes=4, degrees=SP | EP),
)


def parity(demo: Demo) -> None:
    from tests.harness import run

    paths = {"hf": str(demo.hf), "data": str(demo.data), "model": str(demo.work / "tp1pp1.json")}
    for topology in TOPOLOGIES:

        def check(topology=topology) -> tuple[str, bool]:
            found = [result for result in run(compare, topology.processes, topology, paths, timeout=120) if result]
            equal, worst = all(r["equal"] for r in found), max(r["worst"] for r in found)
            loss = max(abs(r["ours"] - r["theirs"]) / abs(r["theirs"]) for r in found)
            if topology.exact:
                return ("bit-equal" if equal else f"logits off by {worst:.1e}"), equal
            return (
                f"logits {worst:.1e}, loss {loss:.1e}",
                worst <= TENSOR_PARALLEL_BOUND and loss <= TENSOR_PARALLEL_BOUND,
            )

        bound = "bit-equal" if topology.exact else f"≤ {TENSOR_PARALLEL_BOUND:.0e}"
        demo.add(f"logits and loss against Hugging Face: {topology.name}", bound, check)


def conversion(demo: Demo) -> None:
    def chain(*layouts: str) -> tuple[str, bool]:
        folder = demo.work / "-".join(layout.replace(" ", "").replace("--", "") for layout in layouts)
        steps = [folder / str(at) for at in range(len(layouts))]
        command("mm-convert", "hf_to_mm", "--hf", demo.hf, "--out", steps[0], *layouts[0].split())
        for before, after, layout in zip(steps, steps[1:], layouts[1:]):
            command("mm-convert", "resplit", "--mm", before, "--out", after, *layout.split())
        command("mm-convert", "mm_to_hf", "--mm", steps[-1], "--hf", demo.hf, "--out", folder / "hf")
        return demo.same_bytes(folder / "hf")

    demo.add(
        "hf → tp2·pp2·ep2 → tp1·pp4 → tp1·pp1 → hf",
        "byte-equal",
        lambda: chain("--tp 2 --pp 2 --ep 2", "--pp 4", "--tp 1"),
    )
    demo.add(
        "hf → ep1 → ep2·etp2 → ep4 → pp2·vpp2 → hf",
        "byte-equal",
        lambda: chain("--tp 1", "--ep 2 --etp 2", "--ep 4", "--pp 2 --vpp 2"),
    )


def training(demo: Demo) -> None:
    runs: dict[str, list[dict]] = {}

    def unbroken(name: str, processes: int, flags: list[str]) -> tuple[str, bool]:
        runs[name] = train(demo, name, processes, flags, load=demo.hf)
        first, last = runs[name][0]["loss"], runs[name][-1]["loss"]
        return f"loss {first:.4f} → {last:.4f}", healthy(runs[name], STEPS) and last < first

    four = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"]
    demo.add(f"{STEPS} steps at TP1·PP1 (torchrun)", "healthy, loss falls", lambda: unbroken("tp1pp1", 1, []))
    demo.add(
        f"{STEPS} steps at TP2·PP2 (torchrun, 4 processes)",
        "healthy, loss falls",
        lambda: unbroken("tp2pp2", 4, four),
    )

    def agree() -> tuple[str, bool]:
        worst = distance(runs["tp1pp1"], runs["tp2pp2"])
        return f"{worst:.1e}", worst <= LOSS_BOUND

    demo.add("loss of each step, TP2·PP2 against TP1·PP1", f"≤ {LOSS_BOUND:.0e}", agree)

    def resumed() -> tuple[str, bool]:
        half, folder = STEPS // 2, demo.work / "runs" / "half"
        train(demo, "half", 4, four, load=demo.hf, model="tp2pp2", steps=half)
        rest = train(demo, "rest", 4, four, load=folder, model="tp2pp2")
        same = [record["loss"] for record in rest] == [record["loss"] for record in runs["tp2pp2"][half:]]
        command("mm-convert", "check", demo.work / "runs" / "rest", demo.work / "runs" / "tp2pp2")
        return ("losses and final weights bit-equal" if same else "losses differ"), same and len(rest) == STEPS - half

    demo.add(f"resumed after {STEPS // 2} steps (torchrun, 4 processes)", "bit-equal", resumed)

    def moved() -> tuple[str, bool]:
        half, folder = STEPS // 2, demo.work / "runs" / "half-tp1pp1"
        command("mm-convert", "resplit", "--mm", demo.work / "runs" / "half", "--out", folder, "--tp", "1", "--pp", "1")
        worst = distance(train(demo, "moved", 1, [], load=folder, model="tp1pp1"), runs["tp1pp1"][half:])
        return f"{worst:.1e}", worst <= LOSS_BOUND

    demo.add("resplit to TP1·PP1 with optimizer, then resumed (torchrun)", f"≤ {LOSS_BOUND:.0e}", moved)

    def on_disk() -> tuple[str, bool]:
        found = sorted(path.name for path in (demo.work / "runs" / "tp2pp2" / f"iter_{STEPS:07d}").glob("mp_rank_*"))
        return f"{len(found)} shards", found == [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(2)]

    demo.add("trained checkpoint split by TP and PP on disk", "4 shards", on_disk)


def train(
    demo: Demo, name: str, processes: int, flags: list, *, load: Path, model: str | None = None, steps: int = STEPS
) -> list[dict]:
    """One `torchrun pretrain_vlm.py`; its iterations in full precision. A flag in `flags` comes in the place of the common one."""
    common = {
        "--micro-batch-size": 1, "--global-batch-size": 4, "--train-iters": steps, "--lr-decay-iters": STEPS, "--lr": 3e-4,
        "--lr-decay-style": "cosine", "--lr-warmup-iters": 3, "--weight-decay": 0, "--clip-grad": 1.0, "--seed": 42,
    }  # fmt: skip
    folder, metrics = demo.work / "runs" / name, demo.work / f"{name}.jsonl"
    given = [word for flag, value in common.items() if flag not in flags for word in (flag, value)]
    return torchrun(
        processes, "pretrain_vlm.py", "--mm-model", demo.work / f"{model or name}.json", "--mm-data", demo.data,
        "--load", load, "--save", folder, "--use-distributed-optimizer", "--log-metrics", metrics, *given, *flags, metrics=metrics,
    )  # fmt: skip
