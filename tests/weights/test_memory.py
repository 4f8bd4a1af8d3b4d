"""Field case B65: the memory of a conversion does not grow with the model, and nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mm_models.weights import hffolder
from mm_models.weights.boxes import volume
from mm_models.weights.model_map import build
from tests.models import tiny_glm_config
from tests.weights.folders import model_config

MEASURE = """
import sys
from mm_models.cli.convert import main
from mm_models.weights.verbs import peak_rss
status = main(sys.argv[1:])
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "megatron", "safetensors"})
print(status, peak_rss(), *heavy)
"""


def large_folder(path, megabytes: int):
    """A folder of holes in 20 MB shards: twice the experts for twice the size, the same layers."""
    experts = megabytes // 400 * 64
    config = tiny_glm_config(
        hidden_size=512, out_hidden_size=512, moe_intermediate_size=680, n_routed_experts=experts, num_experts_per_tok=2
    )
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    tensors = [
        (t.name, "F32" if t.hold else "BF16", t.shape) for t in build(model_config(path)).hf("per_expert").values()
    ]
    shards, weight_map = [[]], {}
    for tensor in tensors:
        if sum(2 * volume(t[2]) for t in shards[-1]) > 20 << 20:
            shards.append([])
        shards[-1].append(tensor)
    for number, shard in enumerate(shards):
        file = path / f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        hffolder.skeleton(file, hffolder.make_header(shard))
        weight_map |= dict.fromkeys((name for name, *_ in shard), file.name)
    (path / hffolder.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def peak(*arguments: object) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    status, rss, *heavy = done.stdout.splitlines()[-1].split()
    assert status == "0", done.stderr
    return int(rss), heavy


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    peaks: dict[str, list[int]] = {}
    for megabytes in (400, 800):
        hf, mm = large_folder(tmp_path / f"hf{megabytes}", megabytes), tmp_path / f"mm{megabytes}"
        dcp, turned = tmp_path / f"dcp{megabytes}", tmp_path / f"turned{megabytes}"
        size = hffolder.open_folder(hf).nbytes
        assert size == pytest.approx(megabytes * 1e6, rel=0.1)
        commands = {
            "hf_to_mm": ["hf_to_mm", "--hf", hf, "--out", mm, "--tp", 2, "--ep", 8, "--jobs", 2],
            "resplit": ["resplit", "--mm", mm, "--out", tmp_path / f"two{megabytes}", "--pp", 2, "--jobs", 2],
            "mm_to_hf": ["mm_to_hf", "--mm", mm, "--hf", hf, "--out", tmp_path / f"back{megabytes}", "--jobs", 2],
            "check": ["check", hf, mm, "--jobs", 2],
            "hf_to_dcp": ["hf_to_dcp", "--hf", hf, "--out", dcp, "--jobs", 2],
            "hf_to_dcp stacked": ["hf_to_dcp", "--hf", hf, "--out", turned, "--expert-layout", "stacked", "--jobs", 2],
            "dcp_to_hf": ["dcp_to_hf", "--dcp", turned, "--hf", hf, "--out", tmp_path / f"out{megabytes}", "--jobs", 2],
            "moe_expert": [
                "moe_expert",
                "--style",
                "merge",
                "--hf",
                hf,
                "--out",
                tmp_path / f"me{megabytes}",
                "--jobs",
                2,
            ],
        }
        for name, command in commands.items():
            rss, heavy = peak(*command)
            peaks.setdefault(name, []).append(rss)
            assert heavy == [], f"{name} imports {heavy}"
    for name, (small, large) in peaks.items():
        slope = (large - small) / 400e6
        assert slope <= 0.05 and large < 200e6, f"{name}: {small / 1e6:.0f} MB, {large / 1e6:.0f} MB, slope {slope:.2f}"
