"""`mm-models tokens`: what is printed and the exit status; the comparison itself is tested beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mm_models.cli.models import COMMANDS, main
from mm_models.data.processor import load_processor
from tests.data import kit
from tests.fsdp2.trainer_kit import write_hf

TOKENS = ["--batches", "2", "--global-batch-size", "2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """model.json, data.json over five numbered rows, and the dump `a` of two steps."""
    base = tmp_path_factory.mktemp("tokens")
    folder = kit.processor_folder(base / "hf")
    picture = kit.picture(base / "data" / "a.png").name
    rows = [kit.row(f"<image>question number {k}", f"the answer is {k}", images=[picture]) for k in range(5)]
    config = kit.data_config(folder, base / "data", rows, shuffle=False)
    (base / "data.json").write_text(json.dumps(config.model_dump(mode="json", exclude_none=True)))
    model = kit.model_config(load_processor(folder)).model_dump(mode="json", exclude_none=True)
    (base / "model.json").write_text(json.dumps(model))
    assert dump(base, "a") == 0
    return base


def dump(base, name: str, *flags: str) -> int:
    argv = ["--mm-model", str(base / "model.json"), "--mm-data", str(base / "data.json"), *TOKENS, *flags]
    return main(["tokens", "dump", *argv, "-o", str(base / name)])


def test_show(files, capsys):
    assert main(["tokens", "show", str(files / "a")]) == 0
    assert "step 2:" in (said := capsys.readouterr().out) and "2 images; samples 2, 3" in said
    assert main(["tokens", "show", str(files / "a"), "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert (
        "<|image|> x 16<|end_of_image|>question number 3<|assistant|>" in said and "[[the answer is 3<|user|>]]" in said
    )
    assert main(["tokens", "show", str(files / "a"), "--batch", "3"]) == 2
    assert "no step 3" in capsys.readouterr().err


def test_compare_shows_the_first_difference_as_text(files, capsys):
    assert dump(files, "same", "--micro-batch-size", "2") == 0
    assert main(["tokens", "compare", str(files / "a"), str(files / "same")]) == 0
    assert "identical: 2 steps (1 to 2)" in capsys.readouterr().out
    rows = json.loads((files / "data" / "train.json").read_text())
    rows[2]["messages"][0]["content"] = "<image>question nimber 2"
    (files / "data" / "train.json").write_text(json.dumps(rows))
    assert dump(files, "other") == 0
    capsys.readouterr()
    assert main(["tokens", "compare", str(files / "a"), str(files / "other")]) == 1
    said = capsys.readouterr().out
    assert "first at step 2, input_ids: sample 2, input_ids[" in said
    left, right = [line.strip() for line in said.splitlines() if ">>>" in line]
    assert left.replace(">>>", "").replace("<<<", "").count("question number 2") == 1
    assert right.replace(">>>", "").replace("<<<", "").count("question nimber 2") == 1
    assert main(["tokens", "compare", str(files / "a"), str(files / "other"), "--batches", "1"]) == 0


def test_dump_of_a_yaml_is_the_dump_of_its_parts(files, capsys):
    """The global batch of 2 is two processes of one sample."""
    hf = write_hf(files / "tiny", vocab_size=512, image_token_id=510)
    config = {
        "data": json.loads((files / "data.json").read_text()),
        "model": {"model_id": "glm4v_moe", "model_name_or_path": str(hf)},
        "training": {"train_iters": 2, "lr": 1e-4, "load": str(hf)},
    }
    (files / "run.yaml").write_text(yaml.safe_dump(config))
    argv = ["tokens", "dump", "--config", str(files / "run.yaml"), "--batches", "2", "-o"]
    assert main([*argv, str(files / "yaml"), "--world", "2", "training.seed=3"]) == 0
    assert dump(files, "json") == 0
    assert main(["tokens", "compare", str(files / "yaml"), str(files / "json")]) == 0
    capsys.readouterr()
    assert main([*argv, str(files / "new"), "--seed", "1"]) == 2
    assert "--seed: the YAML says that" in capsys.readouterr().err


def test_refusals(files, capsys):
    for argv, words in (
        (["compere"], "did you mean 'compare'?"),
        (["show", str(files)], "no token dump there"),
        (["dump", "-o", "x"], "give --mm-model and --mm-data, or --config"),
    ):
        assert main(["tokens", *argv]) == 2
        assert words in capsys.readouterr().err
    assert dump(files, "a") == 2
    assert "holds a token dump already" in capsys.readouterr().err


def test_a_folder_that_cannot_hold_a_dump(files, capsys, monkeypatch):
    """Told before anything is read, not when the steps are done."""
    assert dump(files, "data.json/x") == 2
    assert f"{files}/data.json: not a folder" in capsys.readouterr().err
    monkeypatch.setattr("mm_models.train.tokens.os.access", lambda path, mode: Path(path) != files)
    assert dump(files, "new/er") == 2
    assert f"{files}: a folder that cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("mangle", ["cut", "empty", "gone", "other", "no json"])
def test_a_dump_that_is_cut_off(files, tmp_path, capsys, mangle):
    shutil.copytree(files / "a", tmp_path / "broken")
    tensors, text = (next((tmp_path / "broken").glob(f"*.{kind}")) for kind in ("safetensors", "json"))
    {
        "cut": lambda: tensors.write_bytes(tensors.read_bytes()[:-1]),
        "empty": lambda: tensors.write_bytes(b""),
        "gone": tensors.unlink,
        "other": lambda: text.write_text("{}"),
        "no json": lambda: text.write_text("["),
    }[mangle]()
    for argv in (["show", str(tmp_path / "broken")], ["compare", str(files / "a"), str(tmp_path / "broken")]):
        assert main(["tokens", *argv]) == 2
        assert f"{tmp_path}/broken/dp0.pp0.*: not a token dump, or cut off" in capsys.readouterr().err


def test_help_loads_nothing_heavy():
    """Of all commands: a look at the options answers at once."""
    code = f"""
import sys
from pathlib import Path
from mm_models.cli.models import main
for command in {sorted(COMMANDS)}:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code
print(sorted({{"torch", "transformers", "datasets", "numpy", "PIL", "rich"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
