"""The FSDP2 scripts, run small: one node of two CPU processes, experts on both, from another folder, spaces in paths.

A failure of any kind ends with a status other than 0 and without the closing lines, so that nothing after it in a chain runs.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.examples.kit import (
    CLOSING,
    EXAMPLE,
    FIELD_GBS,
    FIELD_STEP_TIME,
    environment,
    make_place,
    refused,
    running,
    script,
    shell,
    wait_for,
)

NAME = "finetune_glm4_5v_106B_v1.sh"
SMALL = {"NNODES": "1", "NPUS_PER_NODE": "2", "CONFIG": str(EXAMPLE / "glm4_5v_debug.yaml")}
KEYS = {
    "parallel.fully_shard_parallel_size": "auto",
    "parallel.expert_parallel_size": "2",
    "training.gradient_accumulation_steps": "2",
    "training.train_iters": "3",
}
DYING = """
import os
from mm_models.fsdp2 import training

def one_iteration(trainer, state, *args, original=training.one_iteration, **kwargs):
    if trainer.session.rank == 1 and state.iteration == 1:
        os._exit(3)
    return original(trainer, state, *args, **kwargs)

training.one_iteration = one_iteration
"""


pytestmark = pytest.mark.slow  # each starts the whole launch script


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with spaces: `h f` (bf16), `da ta/train.json`, and `d c p`, converted by the shipped script."""
    folder = make_place(tmp_path_factory.mktemp("a place"))
    done = script(folder, "convert_glm4_5v.sh", TARGET="fsdp2", HF_DIR="h f", MM_DIR="d c p")
    assert done.returncode == 0, done.stderr
    return folder


def overrides(place: Path, save: Path, **changes: str) -> list[str]:
    """The words after the script's name; `changes` have __ for each dot."""
    data = "data.dataset_param"
    keys = KEYS | {
        f"{data}.preprocess_parameters.model_name_or_path": place / "h f",
        f"{data}.basic_parameters.dataset_dir": place / "da ta",
        f"{data}.basic_parameters.dataset": place / "da ta" / "train.json",
        "model.model_name_or_path": place / "d c p",
        "training.load": place / "d c p",
        "training.save": save,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def train(place: Path, cwd: Path, *, variables: dict[str, str] | None = None, **changes: str):
    return script(cwd, NAME, *overrides(place, cwd / "sa ve", **changes), **(SMALL | (variables or {})))


def test_a_short_run_succeeds_with_the_fields_closing_lines(place, tmp_path):
    done = train(place, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"train_\d{8}_\d{6}\.log", log.name)
    lines = log.read_text().splitlines()
    assert [line[: line.index(":") + 2] for line in lines[-2:]] == list(CLOSING)
    step_time, rate = (float(line.split(": ")[1]) for line in lines[-2:])
    assert step_time == float(shell(FIELD_STEP_TIME, log)) > 0
    assert shell(FIELD_GBS, log).strip() == "4"  # micro batch 1 x accumulation 2 x 2 ranks
    assert rate == pytest.approx(4 * 1000 / step_time, abs=1e-3)
    assert lines[-2:] == done.stdout.splitlines()[-2:]
    assert (tmp_path / "sa ve" / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"NNODES": "2"}, ("MASTER_ADDR", "address of node 0")),
        ({"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}, ("NODE_RANK", "0 to 1")),
        ({"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "2"}, ("NODE_RANK is '2'",)),
        ({"NPUS_PER_NODE": "0"}, ("NPUS_PER_NODE is '0'",)),
        ({"ASCEND_HOME": "/no/such/cann"}, ("/no/such/cann/set_env.sh",)),
        ({"NPUS_PER_NODE": "3"}, ("parallel.expert_parallel_size", "3")),
        ({"CONFIG": "no such.yaml"}, ("no such.yaml",)),
    ],
)
def test_a_wrong_or_missing_variable_is_refused_at_once(place, tmp_path, variables, texts):
    refused(train(place, tmp_path, variables=variables), *texts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"data__dataset_param__basic_parameters__dataset": "not there.json"}, ("not there.json",)),
        ({"training__load": "no such folder"}, ("training.load", "no such folder")),
        ({"training__lod": "x"}, ("training.lod", "load")),
    ],
)
def test_what_does_not_fit_is_refused_before_any_process_starts(place, tmp_path, changes, texts):
    refused(train(place, tmp_path, **changes), *texts)
    assert not (tmp_path / "logs").exists()


def test_a_worker_that_dies_fails_the_script(place, tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    done = train(place, tmp_path, training__plugin=f"[{tmp_path / 'dying.py'}]")
    refused(done, "exitcode  : 3", "error: training failed with status")


def test_sigterm_stops_the_training_and_fails_the_script(place, tmp_path):
    """The signal reaches the workers, which save; no process stays behind."""
    command = ["bash", EXAMPLE / NAME, *overrides(place, tmp_path / "sa ve", training__train_iters="100000")]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(SMALL), stdout=out, stderr=out)
        try:
            wait_for(lambda: "iteration        2/" in (tmp_path / "out").read_text(), process, 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=80) != 0
        finally:
            process.kill()
    text = (tmp_path / "out").read_text()
    assert not any(line in text for line in CLOSING)
    assert (tmp_path / "sa ve" / "latest_checkpointed_iteration.txt").exists(), text[-3000:]
    assert not running(str(tmp_path)), "processes stayed behind"


def test_the_conversion_script(place, tmp_path):
    """Files beside the checkpoint, the layout that was asked for, and a target that does not exist."""
    assert (place / "d c p" / "latest_checkpointed_iteration.txt").read_text() == "release"
    for name in ("config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja"):
        assert (place / "d c p" / name).is_file(), name
    for folder, layout in ((place / "d c p", "stacked_hf"), (tmp_path / "3 d", "stacked")):
        variables = {"TARGET": "fsdp2", "HF_DIR": "h f", "MM_DIR": str(folder), "EXPERT_LAYOUT": layout}
        done = script(place, "convert_glm4_5v.sh", "--overwrite", **variables)
        assert done.returncode == 0, done.stderr
        assert json.loads((folder / "release" / "manifest.json").read_text())["expert_layout"] == layout
    done = script(place, "convert_glm4_5v.sh", TARGET="fsdp")
    assert done.returncode == 2 and "TARGET is 'fsdp', expected megatron or fsdp2" in done.stderr
