"""Conversion against a plain copy: bytes, wall time, CPU time and peak memory, on checkpoints of full width.

    python benchmarks/convert.py [--family glm-4.5v|qwen2.5-vl-3b] [--to mm|dcp] [--small] [--pairs 7] [--jobs N] [--dir DIR] [--keep]

Makes a random checkpoint, converts it to a Megatron checkpoint or to DCP and back: GLM-4.5V with one dense layer, one of 128
experts and the whole tower (9.4 GB of bf16) at TP2·EP4, or all of Qwen2.5-VL-3B, its head tied (7.5 GB), at TP2·PP2. Compares
each direction with a plain Python preadv/pwrite copy of the same source files into new files, both followed by fsync. Every run
is a process of its own; the order is ABBA, files are removed and synced between runs, and all pairs are printed. Wall and CPU
are those of the whole process, start-up included. Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BOUNDS = {"wall": 1.25, "cpu": 1.5, "bytes": 1.001, "rss": 1 << 30}
BLOCK = 8 << 20


def glm(small: bool) -> dict:
    """config.json of GLM-4.5V at its own widths with two text layers; `small` shrinks them."""
    text = {
        "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 10944, "first_k_dense_replace": 1, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "moe_intermediate_size": 1408, "attention_bias": True, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65536, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision = {
        "depth": 24,
        "hidden_size": 1536,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "intermediate_size": 10944,
        "image_size": 336,
    }
    if small:
        text |= {"vocab_size": 15104, "hidden_size": 1024, "intermediate_size": 2752, "moe_intermediate_size": 352}
        vision |= {"depth": 6, "hidden_size": 384, "out_hidden_size": 1024, "intermediate_size": 2736}
    return {"model_type": "glm4v_moe", "architectures": ["Glm4vMoeForConditionalGeneration"], "dtype": "bfloat16", "text_config": text,
            "vision_config": vision, "image_token_id": 151363, "video_token_id": 151364, "tie_word_embeddings": False}  # fmt: skip


def qwen(small: bool) -> dict:
    """config.json of Qwen2.5-VL-3B, the decoder's fields at the root as published; `small` keeps a sixth of the layers."""
    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": True, "use_sliding_window": False,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048, "hidden_act": "silu",
        "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    }  # fmt: skip
    if small:
        text |= {"num_hidden_layers": 6, "vocab_size": 15200}
        vision |= {"depth": 8, "fullatt_block_indexes": [7]}
    return {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "torch_dtype": "bfloat16", **text,
            "vision_config": vision, "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}  # fmt: skip


MODELS = {"glm-4.5v": (glm, {"tp": 2, "ep": 4}), "qwen2.5-vl-3b": (qwen, {"tp": 2, "pp": 2})}
"""Name -> (config.json, layout of the Megatron checkpoint)."""


def make_checkpoint(folder: Path, raw: dict, shard_bytes: int) -> int:
    """Write a sharded folder of random bf16 bytes (router and its bias fp32), named as published, by streaming; its bytes of tensors."""
    from mm_models.config.family import family_of
    from mm_models.weights import hffolder
    from mm_models.weights.boxes import volume
    from mm_models.weights.model_map import build

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    family = family_of(raw, "config.json")
    wmap = build(family.model(raw), {**family.prefixes, **family.old_prefixes})
    tensors = [(t.name, "F32" if t.hold else "BF16", t.shape) for t in wmap.hf("per_expert").values()]
    shards, size = [[]], 0
    for tensor in tensors:
        if size > shard_bytes:
            shards, size = [*shards, []], 0
        shards[-1].append(tensor)
        size += volume(tensor[2]) * (4 if tensor[1] == "F32" else 2)
    random, weight_map, total = np.random.default_rng(0), {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = hffolder.make_header(shard, {"format": "pt"})
        left = sum(volume(shape) * (4 if dtype == "F32" else 2) for _, dtype, shape in shard)
        total += left
        with (folder / name).open("wb", buffering=0) as file:
            file.write(header)
            while left:
                left -= file.write(random.bytes(min(left, BLOCK)))
            os.fsync(file.fileno())
        weight_map |= dict.fromkeys((tensor[0] for tensor in shard), name)
    (folder / hffolder.INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
    return total


# --- what is measured, each in a process of its own -------------------------------------------------------------------


def run_copy(source: Path, out: Path) -> dict:
    """A plain copy of every weight file below `source` into new files, with fsync."""
    out.mkdir()
    buffer, done = memoryview(bytearray(BLOCK)), 0
    for number, file in enumerate(weight_files(source)):
        reader = os.open(file, os.O_RDONLY)
        writer = os.open(out / str(number), os.O_WRONLY | os.O_CREAT)
        offset = 0
        while got := os.preadv(reader, [buffer], offset):
            os.pwrite(writer, buffer[:got], offset)
            offset += got
        os.fsync(writer)
        os.close(reader)
        os.close(writer)
        done += offset
    return {"read": done, "written": done}


def run_convert(family: str, verb: str, source: Path, out: Path, reference: Path, jobs: int | None) -> dict:
    from mm_models.layout import ParallelLayout
    from mm_models.weights import dcp_verbs, verbs
    from mm_models.weights.conversion import Options
    from mm_models.weights.manifest import open_checkpoint

    options = Options(jobs=jobs, say=lambda text: None)
    if verb == "hf_to_dcp":
        report = dcp_verbs.hf_to_dcp(source, out, expert_layout="stacked_hf", options=options)
    elif verb == "dcp_to_hf":
        report = dcp_verbs.dcp_to_hf(source, reference, out, options=options)
    elif verb == "hf_to_mm":
        report = verbs.hf_to_mm(source, out, verbs.Target(layout=ParallelLayout(**MODELS[family][1])), options=options)
    else:
        report = verbs.mm_to_hf(open_checkpoint(source), reference, out, options=options)
    return {"read": report.bytes_read, "written": report.bytes_written}


def weight_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in (".safetensors", ".pt", ".distcp"))


def child(arguments: list[str]) -> dict:
    """Run one measurement in a fresh process: wall, CPU, peak RSS, bytes."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, "--child", *arguments], capture_output=True, text=True)
    wall = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout) | {"wall": wall}


def measure(
    family: str, verb: str, source: Path, reference: Path, work: Path, pairs: int, jobs: int | None
) -> tuple[list, dict]:
    """`pairs` pairs of (conversion, copy) in alternating order; the last conversion's files stay in `work`/out."""
    convert = [verb, str(source), str(work / "out"), str(reference), str(jobs or 0), family]
    copy = ["copy", str(source), str(work / "copy")]
    rows = []
    for pair in range(pairs):
        results = {}
        for what in ("convert", "copy") if pair % 2 == 0 else ("copy", "convert"):
            for name in ("out", "copy"):
                shutil.rmtree(work / name, ignore_errors=True)
            os.sync()
            results[what] = child(convert if what == "convert" else copy)
        rows.append((results["convert"], results["copy"]))
        one, two = rows[-1]
        print(
            f"  pair {pair + 1}: wall {one['wall']:7.2f} / {two['wall']:7.2f} s = {one['wall'] / two['wall']:.2f}   "
            f"CPU {one['cpu']:6.2f} / {two['cpu']:6.2f} s = {one['cpu'] / two['cpu']:.2f}   RSS {one['rss'] / 1e6:.0f} MB",
            flush=True,
        )
    shutil.rmtree(work / "copy", ignore_errors=True)
    if not (work / "out").exists():
        child(convert)
    return rows, rows[-1][0]


def judge(verb: str, rows: list, source_bytes: int, target_bytes: int) -> bool:
    last = rows[-1][0]
    figures = {
        "bytes read / source": (last["read"] / source_bytes, BOUNDS["bytes"]),
        "bytes written / target": (last["written"] / target_bytes, BOUNDS["bytes"]),
        "wall / copy, median": (statistics.median(a["wall"] / b["wall"] for a, b in rows), BOUNDS["wall"]),
        "CPU / copy, median": (statistics.median(a["cpu"] / b["cpu"] for a, b in rows), BOUNDS["cpu"]),
        "peak RSS, MiB": (max(a["rss"] for a, _ in rows) / (1 << 20), BOUNDS["rss"] / (1 << 20)),
    }
    good = True
    for what, (value, bound) in figures.items():
        good &= value <= bound
        print(f"  {verb}: {what:24} {value:9.4f}   bound {bound:9.4f}   {'ok' if value <= bound else 'MISSED'}")
    return good


def tensor_bytes(folder: Path) -> int:
    from mm_models.weights.dcp.folder import is_dcp, open_dcp
    from mm_models.weights.manifest import open_checkpoint

    if is_dcp(folder):
        return sum(entry.nbytes for entry in open_dcp(folder).manifest.items)
    return sum(entry.nbytes for entry in open_checkpoint(folder).manifest.tensors)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--family", choices=tuple(MODELS), default="glm-4.5v", help="which model")
    parser.add_argument("--to", choices=("mm", "dcp"), default="mm", help="which checkpoint, there and back")
    parser.add_argument("--small", action="store_true", help="a 0.4 GB model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--dir", type=Path, default=Path("benchmark-convert"), help="where to work; removed afterwards")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    args = parser.parse_args()
    if args.dir.exists():
        raise SystemExit(f"{args.dir}: exists already; remove it or give another --dir.")
    hf, made = args.dir / "hf", args.dir / args.to
    there, back = f"hf_to_{args.to}", f"{args.to}_to_hf"
    try:
        size = make_checkpoint(hf, MODELS[args.family][0](args.small), 256 << 20 if args.small else 4 << 30)
        print(
            f"checkpoint: {size / 1e9:.2f} GB in {len(weight_files(hf))} files; {args.to}, {args.pairs} pairs, convert / copy"
        )
        rows, _ = measure(args.family, there, hf, hf, args.dir, args.pairs, args.jobs)
        os.rename(args.dir / "out", made)
        good = judge(there, rows, size, tensor_bytes(made))
        rows, _ = measure(args.family, back, made, hf, args.dir, args.pairs, args.jobs)
        # A Megatron checkpoint repeats what TP replicates; an export reads one copy of each.
        good &= judge(back, rows, size, size)
        same = (
            subprocess.run(["cmp", *map(str, (weight_files(hf)[0], weight_files(args.dir / "out")[0]))]).returncode == 0
        )
        same &= all(
            filecmp.cmp(a, b, shallow=False)
            for a, b in zip(weight_files(hf), weight_files(args.dir / "out"), strict=True)
        )
        print(f"  round trip: {'byte-equal' if same else 'DIFFERS'}")
        return 0 if good and same else 1
    finally:
        if not args.keep:
            shutil.rmtree(args.dir, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        what, source, out, *rest = sys.argv[2:]
        if what == "copy":
            result = run_copy(Path(source), Path(out))
        else:
            result = run_convert(rest[2], what, Path(source), Path(out), Path(rest[0]), int(rest[1]) or None)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps(result | {"cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss * 1024}))
    else:
        sys.exit(main())
