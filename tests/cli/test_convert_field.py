"""The commands of the Qwen2.5-VL practice, as a shell runs them, and the options and verbs of the field that are not here."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mm_models.cli.convert import main
from mm_models.weights.check import compare
from mm_models.weights.manifest import open_checkpoint
from tests.weights.folders import assert_same_folder, hf_folder

COMMANDS = r"""
mm-convert Qwen2_5_VLConverter hf_to_mm \
  --cfg.mm_dir "ckpt/mm_path/Qwen2.5-VL-7B-Instruct" \
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2.5-VL-7B-Instruct" \
  --cfg.parallel_config.llm_pp_layers [[12,16]] \
  --cfg.parallel_config.vit_pp_layers [[32,0]] \
  --cfg.parallel_config.tp_size 1
mm-convert Qwen2_5_VLConverter resplit \
  --cfg.source_dir "ckpt/mm_path/Qwen2.5-VL-7B-Instruct" \
  --cfg.target_dir "ckpt/mm_resplit/Qwen2.5-VL-7B-Instruct" \
  --cfg.source_parallel_config.llm_pp_layers [12,16] \
  --cfg.source_parallel_config.vit_pp_layers [32,0] \
  --cfg.source_parallel_config.tp_size 1 \
  --cfg.target_parallel_config.llm_pp_layers [[1,9],[9,9]] \
  --cfg.target_parallel_config.vit_pp_layers [[32,0],[0,0]] \
  --cfg.target_parallel_config.tp_size 2
mm-convert Qwen2_5_VLConverter mm_to_hf \
  --cfg.save_hf_dir "ckpt/mm_to_hf/Qwen2.5-VL-7B-Instruct" \
  --cfg.mm_dir "ckpt/mm_resplit/Qwen2.5-VL-7B-Instruct" \
  --cfg.hf_config.hf_dir "ckpt/hf_path/Qwen2.5-VL-7B-Instruct" \
  --cfg.parallel_config.llm_pp_layers [[1,9],[9,9]] \
  --cfg.parallel_config.vit_pp_layers [[32,0],[0,0]] \
  --cfg.parallel_config.tp_size 2
"""
"""The first is the practice's; the others go on from it as its README does, but over virtual chunks."""


@pytest.mark.slow
def test_the_practice_as_written(tmp_path):
    """28 decoder and 32 vision layers, as the 7B has; brackets unquoted in bash; virtual chunks there and back."""
    name = "Qwen2.5-VL-7B-Instruct"
    layers = {"num_hidden_layers": 28, "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31]}
    hf = hf_folder(tmp_path / "ckpt/hf_path" / name, family="qwen2_5_vl", shard_size="1MB", **layers)
    program = f'mm-convert() {{ "{sys.executable}" -m mm_models.cli.convert "$@"; }}\nset -e\n'
    done = subprocess.run(["bash", "-c", program + COMMANDS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mm, resplit = (tmp_path / "ckpt" / kind / name for kind in ("mm_path", "mm_resplit"))
    assert open_checkpoint(mm).manifest.split.text.nested() == [[12, 16]]
    assert open_checkpoint(resplit).manifest.layout.flags() == "--tp 2 --pp 2 --vpp 2"
    assert compare(mm, resplit).equal
    assert_same_folder(tmp_path / "ckpt/mm_to_hf" / name, hf)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "qwen", family="qwen2_5_vl")


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_options_that_say_what_is_done_anyway_are_accepted(hf, tmp_path):
    given = ["--cfg.common_model_config.enable_canonical_hf_struct", "false", "--cfg.save_vit_only", "False"]
    given += ["--cfg.trust_remote_code", "true"]
    layout = {"vit_tp_size": "2", "tp_size": "2", "ep_size": "1", "audio_tp_size": "0", "audio_pp_layers": "[[0,0]]"}

    def flags(section: str, **more: str) -> list[str]:
        return [part for name, value in {**layout, **more}.items() for part in (f"--cfg.{section}.{name}", value)]

    mm, two, out = (tmp_path / name for name in ("mm", "two", "out"))
    source = ["--cfg.hf_config.hf_dir", hf, *given]
    lists = {"llm_pp_layers": "[[1,3]]", "vit_pp_layers": "[[4,0]]"}
    assert run("Qwen2_5_VLConverter", "hf_to_mm", "--cfg.mm_dir", mm, *source, *flags("parallel_config", **lists)) == 0
    sides = [*flags("source_parallel_config", llm_pp_layers="[1,3]"), *flags("target_parallel_config", vit_tp_size="0")]
    assert run("Qwen2_5_VLConverter", "resplit", "--cfg.source_dir", mm, "--cfg.target_dir", two, *sides) == 0
    assert open_checkpoint(two).manifest.layout.flags() == "--tp 2"
    save = ["--cfg.mm_dir", two, "--cfg.save_hf_dir", out, *source, *flags("parallel_config")]
    assert run("Qwen2_5_VLConverter", "mm_to_hf", *save) == 0
    assert_same_folder(out, hf)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["common_model_config.enable_canonical_hf_struct", "True"], "q, k, v and gate, up are stored fused. Leave it out"),
        (["common_model_config.enable_canonical_hf_struct", "1"], "got '1', expected true or false"),
        (["save_vit_only", "true"], "a checkpoint holds the whole model. Leave it out"),
        (["parallel_config.vit_tp_size", "2"], "vit_tp_size is 2, tp_size 1: all parts of a model have one TP"),
        (["parallel_config.vit_tp_size", "x"], "got 'x', expected a whole number"),
        (["parallel_config.audio_tp_size", "2"], "no model here has an audio encoder"),
        (["parallel_config.audio_pp_layers", "[[0,4]]"], "no model here has an audio encoder"),
        (["parallel_config.ep_size", "2"], "the model has no experts"),
        (["common_model_config.num_key_value_heads", "2"], "config.json says it. Leave it out"),
        (["common_model_config.llm_hf_dir", "x"], "the decoder is read from the folder of --cfg.hf_config.hf_dir"),
        (["common_model_config.model_prefix", "x"], "old and new names are found in the folder itself"),
        (["parallel_config.cp_size", "2"], "unknown option '--cfg.parallel_config.cp_size'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_options_that_would_mean_something_else_are_refused(hf, tmp_path, capsys, options, words):
    name, value = options
    given = ["--cfg.hf_config.hf_dir", hf, "--cfg.mm_dir", tmp_path / "mm", f"--cfg.{name}", value]
    assert run("Qwen2_5_VLConverter", "hf_to_mm", *given) == 2
    said = capsys.readouterr().err
    assert words in said and (name in said or "ep_size" in name) and "Traceback" not in said, said
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("lora_hf_to_mm", "merge them into the Hugging Face weights, then hf_to_mm"),
        ("lora_mm_to_hf", "merge them into the Hugging Face weights, then hf_to_mm"),
        ("hf_to_mm_ldt", "hf_to_mm places layers by --llm-pp-layers and --vit-pp-layers"),
        ("hf_to_mm_dcp", "hf_to_dcp writes what the FSDP2 target loads"),
    ],
)
def test_verbs_of_the_field_say_what_to_do_instead(capsys, verb, words):
    assert run("Qwen2_5_VLConverter", verb, "--cfg.mm_dir", "a") == 2
    said = capsys.readouterr().err
    assert re.match(rf"mm-convert: error: Qwen2_5_VLConverter {verb}: not supported\. ", said) and words in said


def test_another_familys_converter_is_refused(hf, tmp_path, capsys):
    for converter in ("Qwen2VLConverter", "GlmConverter"):
        assert run(converter, "hf_to_mm", "--hf", hf, "--out", tmp_path / "mm") == 2
        assert f"is converted by Qwen2_5_VLConverter, not {converter}" in capsys.readouterr().err
    assert run("Qwen2_5_VLConverter", "hf_to_mm", "--hf", hf, "--out", tmp_path / "mm", "--tp", 2) == 0
    assert run("Qwen2VLConverter", "resplit", "--mm", tmp_path / "mm", "--out", tmp_path / "no") == 2
    assert "is converted by Qwen2_5_VLConverter, not Qwen2VLConverter" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
