"""The demo's rows on the FSDP2 target: parity in every kind of layout, DCP and back, training, resume, and both targets side by side."""

from __future__ import annotations

from pathlib import Path

from examples.quickstart.demo_kit import LOSS_BOUND, ROOT, STEPS, Demo, command, distance, healthy, torchrun
from examples.quickstart.parity_fsdp2 import Layout, compare

CONFIG = ROOT / "examples" / "glm4.5v" / "glm4_5v_debug.yaml"
LONG_STEPS = 200
MEAN_BOUND, WORST_BOUND = 5e-4, 1e-2
TOWER = ("patch_embed", "post_conv_layernorm", "embeddings", "blocks.{*}", "post_layernorm", "downsample")
"""What `freeze` true means for a `vision_encoder` of model.json, the default there."""

LAYOUTS = (
    Layout(name="FSDP2, one process"),
    Layout(name="FSDP2, one process, bf16", dtype="bf16"),
    Layout(name="FSDP2 on 2", processes=2),
    Layout(name="FSDP2 on 2, EP2", processes=2, ep=2),
    Layout(name="FSDP2 on 4, HSDP 2×2, EP2, bf16", processes=4, ep=2, shard=2, dtype="bf16"),
)


def parity(demo: Demo) -> None:
    from tests.harness import run

    paths = {"hf": str(demo.hf), "data": str(demo.data), "model": str(demo.work / "tp1pp1.json"), "yaml": str(CONFIG)}
    settings = places(demo, load=demo.hf) | {"training.save": "null", "features.enable_chunk_loss": "false"}
    load = [f"{key}={value}" for key, value in settings.items()]
    for layout in LAYOUTS:

        def check(layout=layout) -> tuple[str, bool]:
            found = run(compare, layout.processes, layout, paths, load, timeout=120)
            equal, worst = all(r["equal"] for r in found), max(r["worst"] for r in found)
            return ("bit-equal" if equal else f"logits off by {worst:.1e}"), equal

        demo.add(f"logits and loss against Hugging Face: {layout.name}", "bit-equal", check)


def conversion(demo: Demo) -> None:
    for layout in ("stacked_hf", "stacked", "flat"):

        def chain(layout=layout) -> tuple[str, bool]:
            dcp, back = demo.work / f"dcp-{layout}", demo.work / f"hf-{layout}"
            command("mm-convert", "hf_to_dcp", "--hf", demo.hf, "--out", dcp, "--expert-layout", layout)
            command("mm-convert", "dcp_to_hf", "--dcp", dcp, "--hf", demo.hf, "--out", back)
            return demo.same_bytes(back)

        demo.add(f"hf → dcp ({layout}) → hf", "byte-equal", chain)


def training(demo: Demo) -> None:
    runs: dict[str, list[dict]] = {}

    def unbroken(name: str, processes: int, load: Path, keys: dict[str, object]) -> tuple[str, bool]:
        runs[name] = train(demo, name, processes, keys, load=load)
        first, last = runs[name][0]["loss"], runs[name][-1]["loss"]
        return f"loss {first:.4f} → {last:.4f}", healthy(runs[name], STEPS) and last < first

    one = {"training.gradient_accumulation_steps": 4}
    two = {"training.gradient_accumulation_steps": 2, "parallel.expert_parallel_size": 2}
    dcp, fall = demo.work / "dcp-stacked_hf", "healthy, loss falls"
    demo.add(f"FSDP2: {STEPS} steps on one process (torchrun)", fall, lambda: unbroken("fsdp1", 1, dcp, one))
    demo.add(f"FSDP2: {STEPS} steps on 2, EP2 (torchrun)", fall, lambda: unbroken("fsdp2ep2", 2, dcp, two))

    def agree() -> tuple[str, bool]:
        worst = distance(runs["fsdp2ep2"], runs["fsdp1"])
        return f"{worst:.1e}", worst <= LOSS_BOUND

    demo.add("loss of each step, EP2 against one process", f"≤ {LOSS_BOUND:.0e}", agree)

    def level_one() -> tuple[str, bool]:
        records = train(demo, "fsdp1hf", 1, one, load=demo.hf)
        same = [record["loss"] for record in records] == [record["loss"] for record in runs["fsdp1"]]
        return ("bit-equal" if same else "losses differ"), same

    demo.add(f"{STEPS} losses, DCP load against Hugging Face load", "bit-equal", level_one)

    def resumed() -> tuple[str, bool]:
        half, folder = STEPS // 2, demo.work / "runs" / "fsdphalf"
        train(demo, "fsdphalf", 2, two | {"training.exit_interval": half}, load=dcp)
        resume = {"training.no_load_optim": "false", "training.no_load_rng": "false"}
        rest = train(demo, "fsdprest", 2, two | resume, load=folder)
        same = [record["loss"] for record in rest] == [record["loss"] for record in runs["fsdp2ep2"][half:]]
        command("mm-convert", "check", demo.work / "runs" / "fsdprest", demo.work / "runs" / "fsdp2ep2")
        return ("losses and final weights bit-equal" if same else "losses differ"), same and len(rest) == STEPS - half

    demo.add(f"FSDP2: resumed after {STEPS // 2} steps (torchrun, 2 processes)", "bit-equal", resumed)

    def exported() -> tuple[str, bool]:
        trained, out = demo.work / "runs" / "fsdp2ep2", demo.work / "hf-trained"
        command("mm-convert", "dcp_to_hf", "--dcp", trained, "--hf", demo.hf, "--out", out)
        command("mm-convert", "check", trained, out)
        return "every tensor equal", True

    demo.add("FSDP2: trained checkpoint → hf", "bit-equal", exported)


def both_targets(demo: Demo) -> None:
    """The two targets on the same batches, at the learning rate of a fine-tuning."""
    from examples.quickstart import demo_megatron

    def check() -> tuple[str, bool]:
        flags = [
            "--lr-decay-iters",
            LONG_STEPS,
            "--lr-warmup-iters",
            LONG_STEPS // 10,
            "--lr",
            1e-5,
            "--global-batch-size",
            1,
        ]
        theirs = demo_megatron.train(demo, "long", 1, flags, load=demo.hf, model="tp1pp1", steps=LONG_STEPS)
        frozen = ", ".join(f"'model.visual.{part}'" for part in TOWER)
        keys = {"training.train_iters": LONG_STEPS, "training.lr": 1e-5, "model.freeze": f"[{frozen}]"}
        ours = train(demo, "long-fsdp2", 1, keys, load=demo.hf)
        rates = [abs(a["learning_rate"] - b["learning_rate"]) for a, b in zip(ours, theirs, strict=True)]
        assert max(rates) < 1e-15, f"learning rates differ by {max(rates)}"
        apart = [abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(ours, theirs, strict=True)]
        mean, worst = sum(apart) / len(apart), max(apart)
        return f"mean {mean:.1e}, worst {worst:.1e}", mean <= MEAN_BOUND and worst <= WORST_BOUND

    demo.add(
        f"Megatron against FSDP2 target: {LONG_STEPS} losses on the same batches (torchrun)",
        f"mean ≤ {MEAN_BOUND:.0e}, worst ≤ {WORST_BOUND:.0e}",
        check,
    )


def places(demo: Demo, *, load: Path) -> dict[str, object]:
    """The keys of the YAML that name places of the demo, computing in fp32."""
    data = "data.dataset_param"
    return {
        f"{data}.preprocess_parameters.model_name_or_path": demo.hf,
        f"{data}.basic_parameters.dataset": demo.data.parent / "train.json",
        f"{data}.basic_parameters.dataset_dir": demo.data.parent,
        "model.model_name_or_path": demo.hf,
        "training.load": load,
        "training.load_format": "hf" if load == demo.hf else "auto",
    }


def train(demo: Demo, name: str, processes: int, keys: dict[str, object], *, load: Path) -> list[dict]:
    """One `torchrun pretrain_fsdp2.py` in fp32; its iterations in full precision."""
    metrics = demo.work / f"{name}.jsonl"
    common = {
        "training.save": demo.work / "runs" / name, "training.save_interval": "null", "training.log_metrics": metrics,
        "training.train_iters": STEPS, "training.lr": 3e-4, "training.clip_grad": 1.0, "training.seed": 42,
        "parallel.fully_shard_parallel_size": "auto", "parallel.fsdp_plan.param_dtype": "fp32",
    }  # fmt: skip
    settings = places(demo, load=load) | common | keys
    words = [f"{key}={value}" for key, value in settings.items()]
    return torchrun(processes, "pretrain_fsdp2.py", CONFIG, *words, metrics=metrics)
