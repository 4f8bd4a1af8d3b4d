"""The commands of the documentation are commands: they run, in order, in a copy of the checkout; none hides from that.

A ```bash block runs, unless the line above says `<!-- not run: reason -->`. README.md comes first; the other pages build
on the folders it makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks, commands, pages, tracked

QUICKSTART = "examples/quickstart/README.md"
EXPECTED = {
    "README.md": (14, 5),
    "docs/weights.md": (6, 0),
    "docs/equivalence.md": (1, 2),
    "docs/data-tools.md": (3, 1),
    QUICKSTART: (2, 0),
    "examples/glm4.5v/README.md": (0, 9),
    "examples/glm4.5v/README_fsdp2.md": (0, 7),
    "examples/qwen2vl/README.md": (0, 8),
    "examples/qwen2.5vl/README.md": (0, 12),
    "examples/glm4.1v/README.md": (0, 8),
    "CONTRIBUTING.md": (0, 2),
}
"""Page -> blocks that run, blocks that do not. Every page with a bash block is here, so a block that stops running shows."""


PROGRAMS = {
    "make",
    "python",
    "mm-convert",
    "mm-models",
    "torchrun",
    "hf",
    "modelscope",
    "pip",
    "bash",
    "export",
    ".",
    ".ci/run",
}


def test_no_block_hides():
    found = {}
    for page in pages():
        shells = [block for block in blocks(page) if block.kind in ("bash", "console", "sh", "shell")]
        if shells:
            found[str(page.relative_to(ROOT))] = (sum(b.runs for b in shells), sum(not b.runs for b in shells))
    assert {page: counts for page, counts in found.items() if not page.endswith(".zh.md")} == EXPECTED


PAIRS = sorted(str(page.relative_to(ROOT)).removesuffix(".zh.md") for page in pages() if page.name.endswith(".zh.md"))


@pytest.mark.parametrize("page", PAIRS)
def test_the_chinese_page_has_the_same_blocks(page):
    pair = [ROOT / f"{page}{ending}" for ending in (".md", ".zh.md")]
    english, chinese = ([(block.kind, block.text, block.runs) for block in blocks(one)] for one in pair)
    assert english == chinese


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of every file of the checkout."""
    copy = tmp_path / "checkout"
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return copy


def run_page(page: str, checkout: Path) -> None:
    """Run a page's blocks, in order; `checkout` is both the working directory and where packages come from."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(checkout)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for block in blocks(ROOT / page):
        if block.runs:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_the_commands_run(checkout):
    """The README's chain, and the pages that go on from it."""
    for page in EXPECTED:
        if page != QUICKSTART:
            run_page(page, checkout)
    made = checkout / "build" / "quickstart"
    runs = {"run": "8", "run_tp2": "12", "fsdp2": "8", "fsdp2_pp2": "release"}
    assert {run: (made / run / "latest_checkpointed_iteration.txt").read_text() for run in runs} == runs
    one, two = (_losses(made / name) for name in ("one.jsonl", "pp2.jsonl"))
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 4
    _loads(made / "hf_trained")
    _loads(made / "hf_fsdp2")


@pytest.mark.slow
def test_the_quickstarts_commands_run(checkout):
    run_page(QUICKSTART, checkout)


def _losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def _loads(folder: Path) -> None:
    """The export is a whole model and a different one from the start."""
    from transformers import AutoTokenizer, Glm4vMoeForConditionalGeneration

    model, report = Glm4vMoeForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    start = Glm4vMoeForConditionalGeneration.from_pretrained(folder.parent / "hf")
    assert not model.lm_head.weight.equal(start.lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_every_command_is_known():
    """A page's commands call programs that are there, also those that are not run here."""
    for page in pages():
        for block in blocks(page):
            if block.kind in ("bash", "console"):
                for words in commands(block):
                    assert words[0] in PROGRAMS, f"{block}: {words}"
