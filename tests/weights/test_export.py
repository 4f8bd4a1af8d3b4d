"""Field case B33: an export is a complete folder that stands alone, with the original gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mm_models.layout import ParallelLayout
from mm_models.weights import verbs
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import QUIET, copy, edit_config, state_of, to_hf, to_mm

MAKE = Path(__file__).parents[2] / "examples/quickstart/make_checkpoint.py"


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The quickstart's checkpoint: weights, tokenizer, processor, chat template."""
    out = tmp_path_factory.mktemp("complete") / "hf"
    subprocess.run([sys.executable, str(MAKE), "--out", str(out), "--dtype", "bf16"], check=True, capture_output=True)
    return out


def prompt(folder: Path) -> dict:
    from mm_models.data.processor import load_processor

    processor = load_processor(folder)
    image = np.random.default_rng(0).integers(0, 255, (84, 56, 3), np.uint8)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    return dict(processor(text=[text], images=[image], return_tensors="pt"))


def test_an_export_stands_alone(complete, tmp_path):
    from transformers import AutoConfig, AutoTokenizer, Glm4vMoeForConditionalGeneration

    hf = copy(complete, tmp_path / "original")
    before = prompt(hf)
    mm = to_mm(hf, tmp_path / "mm", tp=2, ep=2)
    said: list[str] = []
    verbs.mm_to_hf(open_checkpoint(mm), hf, tmp_path / "export", options=verbs.Options(say=said.append))
    assert not said
    hf.rename(tmp_path / "gone")
    export = tmp_path / "export"
    assert AutoConfig.from_pretrained(export).model_type == "glm4v_moe"
    assert AutoTokenizer.from_pretrained(export, local_files_only=True).vocab_size > 0
    model, info = Glm4vMoeForConditionalGeneration.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    after = prompt(export)
    assert set(after) == set(before) and all(torch.equal(after[key], before[key]) for key in before)
    for name in ("generation_config.json", "chat_template.jinja", "processor_config.json", "tokenizer.json"):
        assert (export / name).read_bytes() == (tmp_path / "gone" / name).read_bytes()
    dtype = json.loads((export / "config.json").read_text())["dtype"]
    assert {str(t.dtype) for n, t in state_of(export).items() if "mlp.gate." not in n} == {f"torch.{dtype}"}
    assert model.dtype == getattr(torch, dtype)


def test_no_json_holds_a_path_of_the_machine(complete, tmp_path):
    hf = copy(complete, tmp_path / "hf")
    edit_config(hf, lambda config: config.update(_name_or_path=str(hf)))
    tokenizer = json.loads((hf / "tokenizer_config.json").read_text()) | {"name_or_path": str(hf)}
    (hf / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    out = to_hf(to_mm(hf, tmp_path / "mm"), hf, tmp_path / "out")
    for file in out.glob("*.json"):
        assert str(tmp_path) not in file.read_text(), file.name
    assert json.loads((out / "config.json").read_text())["model_type"] == "glm4v_moe"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["processor_config.json"], "no processor"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer"),
        (["chat_template.jinja"], "no chat template"),
        (["generation_config.json"], "no generation config"),
    ],
    ids=str,
)
def test_what_the_reference_lacks_is_said(complete, tmp_path, names, words):
    hf = copy(complete, tmp_path / "hf")
    for name in names:
        (hf / name).unlink()
    mm, said = tmp_path / "mm", []
    verbs.hf_to_mm(hf, mm, verbs.Target(layout=ParallelLayout()), options=QUIET)
    verbs.mm_to_hf(open_checkpoint(mm), hf, tmp_path / "out", options=verbs.Options(say=said.append))
    assert any(words in line and line.startswith("warning") for line in said)


def test_only_what_belongs_to_a_model_is_copied(complete, tmp_path):
    hf = copy(complete, tmp_path / "hf")
    for name in ("pytorch_model.bin", "optimizer.pt", ".gitattributes", "pytorch_model.bin.index.json"):
        (hf / name).write_text("{}")
    (hf / "original").mkdir()
    (hf / "README.md").write_text("card")
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates/tools.jinja").write_text("x")
    out = to_hf(to_mm(hf, tmp_path / "mm"), hf, tmp_path / "out")
    names = {file.name for file in out.iterdir()}
    assert {"README.md", "additional_chat_templates", "mm_export.json"} <= names
    assert not names & {
        "pytorch_model.bin",
        "optimizer.pt",
        ".gitattributes",
        "original",
        "pytorch_model.bin.index.json",
    }
