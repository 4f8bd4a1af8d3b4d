"""What leaves the house: a folder that stands alone, and weights that came through a run as they went in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mm_models.cli.convert import main
from mm_models.data.processor import load_processor
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.data import kit
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import launch_synthetic, tiny_flags
from tests.weights.folders import copy, edit_config, hf_folder, state_of, to_hf, to_mm

# --- B33 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The quickstart's bf16 folder: model, generation config, tokenizer, processor, template."""
    folder, maker = tmp_path_factory.mktemp("field"), kit.quickstart("make_checkpoint")
    maker.write_checkpoint(folder / "hf", dtype=maker.DTYPES["bf16"])
    return folder / "hf"


def ids(folder: Path) -> list[int]:
    """One image prompt through the folder's own processor."""
    return kit.hf_ids(load_processor(folder), kit.turns("<image>What is this?", "A wheel."), [kit.pattern(56, 56)])


LOADS = """
import sys
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, Glm4vMoeForConditionalGeneration
folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder)
model, info = Glm4vMoeForConditionalGeneration.from_pretrained(folder, dtype="auto", output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
dtypes = {str(p.dtype) for n, p in model.named_parameters() if not n.endswith("mlp.gate.weight")}
assert dtypes == {str(config.dtype)}, (dtypes, config.dtype)
assert len(AutoTokenizer.from_pretrained(folder)) == 512
assert GenerationConfig.from_pretrained(folder).eos_token_id
print("all there")
"""


def test_an_export_stands_alone(complete, tmp_path):
    """B33: the reference renamed away, no network: config, tokenizer, generation config and model load; one image prompt gives the same
    ids; data types agree; no JSON has a path of this machine."""
    reference = copy(complete, tmp_path / "reference")
    out = to_hf(to_mm(reference, tmp_path / "mm", tp=2, ep=2), reference, tmp_path / "out")
    before = ids(reference)
    reference.rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "mm")
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", LOADS, str(out)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "all there", done.stderr[-3000:]
    assert ids(out) == before and before.count(load_processor(out).image_token_id) == 4
    for file in [*out.glob("*.json"), *out.glob("*.jinja")]:
        assert str(tmp_path) not in file.read_text() and "/work" not in file.read_text() and "/tmp" not in file.read_text(), file.name
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"} <= {p.name for p in out.iterdir()}


def test_a_path_in_a_config_does_not_travel(complete, tmp_path):
    """B33: `_name_or_path` of the machine that wrote the reference is left out."""
    reference = copy(complete, tmp_path / "reference")
    edit_config(reference, lambda config: config.update(_name_or_path="/home/someone/glm"))
    out = to_hf(to_mm(reference, tmp_path / "mm"), reference, tmp_path / "out")
    assert "someone" not in (out / "config.json").read_text()
    assert json.loads((out / "config.json").read_text())["model_type"] == "glm4v_moe"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("processor_config.json", "no processor"), ("tokenizer*", "no tokenizer"), ("chat_template*", "no chat template"), ("generation_config.json", "no generation config")],
)
def test_what_the_reference_lacks_is_said(complete, tmp_path, capsys, pattern, words):
    """B33: a reference folder without it: the export is made, with a warning."""
    reference = copy(complete, tmp_path / "reference")
    for file in reference.glob(pattern):
        file.unlink()
    to_mm(reference, tmp_path / "mm")
    assert main(["mm_to_hf", "--mm", str(tmp_path / "mm"), "--hf", str(reference), "--out", str(tmp_path / "out")]) == 0
    assert words in (said := capsys.readouterr()).err + said.out
    assert compare(reference, tmp_path / "out").equal


# --- B02's and B05's kind, through a whole run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nprocs", "flags", "dtype"),
    [
        (4, [*topology(tp=2, ep=2, etp=1, pp=2), SP], torch.float32),
        (4, [*topology(ep=2), DISTRIBUTED], torch.bfloat16),
        (2, topology(pp=2, vpp=2), torch.float32),
    ],
    ids=["tp2·ep2·pp2", "ep2·dp2 bf16", "pp2·vpp2"],
)
def test_a_run_that_changes_nothing_saves_what_it_loaded(tmp_path, nprocs, flags, dtype):
    """B05, B36: load a Hugging Face folder, step at a learning rate too small to change a bit, save, export: the same bytes; and the moments
    of every expert are its own."""
    hf = hf_folder(tmp_path / "hf", dtype=dtype)
    bf16 = ["--bf16"] if dtype == torch.bfloat16 else []
    argv = tiny_flags(tmp_path, *flags, *bf16, "--load", str(hf), "--save", str(tmp_path / "ck"), "--lr", "1e-30", steps=1)
    at = argv.index("--lr")
    del argv[at : at + 2]
    launch_synthetic(nprocs, argv, tmp_path / "m.jsonl")
    assert compare(hf, tmp_path / "ck").equal
    back, state = state_of(to_hf(tmp_path / "ck", hf, tmp_path / "back")), state_of(hf)
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in state)
    moments = {moment.name for moment in open_checkpoint(tmp_path / "ck").manifest.optimizer}
    assert moments == {e.name for e in open_checkpoint(tmp_path / "ck").manifest.tensors if not e.name.endswith("e_score_correction_bias")}
