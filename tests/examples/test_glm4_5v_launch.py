"""The shipped launch scripts, run small: one node of two CPU processes, the quickstart's model, from another folder, spaces in paths.

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
    mm_models,
    refused,
    running,
    script,
    shell,
    wait_for,
)

SMALL = {
    "NNODES": "1",
    "NPUS_PER_NODE": "2",
    "TP": "1",
    "PP": "2",
    "EP": "1",
    "ETP": "1",
    "MBS": "1",
    "GRAD_ACC_STEP": "2",
    "TRAIN_ITERS": "3",
}
DYING = """
import os
from mm_models.mcore import training

def one_iteration(trainer, state, *args, original=training.one_iteration, **kwargs):
    if trainer.session.rank == 1 and state.iteration == 1:
        os._exit(3)
    return original(trainer, state, *args, **kwargs)

training.one_iteration = one_iteration
"""


pytestmark = pytest.mark.slow  # each starts the whole launch script


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with spaces: `h f` (bf16), `da ta/data.json`, `model.json`, and `m m`, converted by the shipped script."""
    folder = make_place(tmp_path_factory.mktemp("a place"))
    mm_models(folder, "init", "--hf", "h f", "--pp", "2", "-o", "model.json")
    done = script(
        folder,
        "convert_glm4_5v.sh",
        HF_DIR="h f",
        MM_DIR="m m",
        MODEL_JSON="model.json",
        TP="1",
        PP="2",
        EP="1",
        ETP="1",
    )
    assert done.returncode == 0, done.stderr
    return folder


def files(place: Path, save: Path) -> dict[str, str]:
    return {
        "MODEL_JSON": str(place / "model.json"),
        "DATA_JSON": str(place / "da ta" / "data.json"),
        "LOAD": str(place / "m m"),
        "SAVE": str(save),
    }


def train(place: Path, cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return script(cwd, "finetune_glm4_5v_106B.sh", *arguments, **(SMALL | files(place, cwd / "sa ve") | variables))


def test_a_short_run_succeeds_with_the_fields_closing_lines(place, tmp_path):
    done = train(place, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"train_\d{8}_\d{6}\.log", log.name)
    lines = log.read_text().splitlines()
    assert [line[: line.index(":") + 2] for line in lines[-2:]] == list(CLOSING)
    step_time, rate = (float(line.split(": ")[1]) for line in lines[-2:])
    assert step_time == float(shell(FIELD_STEP_TIME, log)) > 0
    assert shell(FIELD_GBS, log).strip() == "2"  # MBS 1 x GRAD_ACC_STEP 2 x DP 1
    assert rate == pytest.approx(2 * 1000 / step_time, abs=1e-3)
    assert lines[-2:] == done.stdout.splitlines()[-2:]
    assert (tmp_path / "sa ve" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_the_figure_of_a_long_run_is_the_fields(tmp_path):
    """The script's awk over a log of 10,000 lines: the mean of lines 101 to 200, with no pipe to break."""
    text = (EXAMPLE.parent / "launch.sh").read_text()
    program = re.search(r"^ +step_time=\$\((.*?)^ +' \"\$LOG\"\)$", text, re.M | re.S).group(1) + '\' "$1"'
    for count in (1, 3, 150, 10_000):
        log = tmp_path / f"{count}.log"
        log.write_text(
            "".join(
                f" iteration {i} | elapsed time per iteration (ms): {i * 1.5:.1f} | x: 1 |\n"
                for i in range(1, count + 1)
            )
        )
        assert shell(program, log) == shell(FIELD_STEP_TIME, log)
    assert shell(program, tmp_path / "10000.log") == "225.8"


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"NNODES": "2"}, ("MASTER_ADDR", "address of node 0")),
        ({"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}, ("NODE_RANK", "0 to 1")),
        ({"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "NODE_RANK": "2"}, ("NODE_RANK is '2'",)),
        ({"NPUS_PER_NODE": "3"}, ("3 processes do not divide by TP x PP = 1 x 2",)),
        ({"GRAD_ACC_STEP": "0"}, ("GRAD_ACC_STEP is '0'",)),
        ({"ASCEND_HOME": "/no/such/cann"}, ("/no/such/cann/set_env.sh",)),
    ],
)
def test_a_wrong_or_missing_variable_is_refused_at_once(place, tmp_path, variables, texts):
    refused(train(place, tmp_path, **variables), *texts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"DATA_JSON": "no such data.json"}, ("no such data.json",)),
        ({"PP": "1", "TP": "2"}, ("pipeline_num_layers", "length 2")),  # model.json is for PP 2
        ({"LOAD": "no such folder"}, ("no such folder",)),
    ],
)
def test_files_that_do_not_fit_are_refused_before_any_process_starts(place, tmp_path, variables, texts):
    refused(train(place, tmp_path, **variables), *texts)
    assert not (tmp_path / "logs").exists()


def test_a_bad_data_path_inside_data_json_fails(place, tmp_path):
    value = json.loads((place / "da ta" / "data.json").read_text())
    value["dataset_param"]["basic_parameters"]["dataset"] = "not there.json"
    (tmp_path / "data.json").write_text(json.dumps(value))
    refused(train(place, tmp_path, DATA_JSON="data.json"), "not there.json")


def test_a_worker_that_dies_fails_the_script(place, tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    done = train(place, tmp_path, "--plugin", str(tmp_path / "dying.py"))
    refused(done, "exitcode  : 3", "error: training failed with status")


def test_sigterm_stops_the_training_and_fails_the_script(place, tmp_path):
    """The signal reaches the workers, which save; no process stays behind."""
    command = ["bash", EXAMPLE / "finetune_glm4_5v_106B.sh"]
    variables = SMALL | files(place, tmp_path / "sa ve") | {"TRAIN_ITERS": "100000"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(variables), stdout=out, stderr=out)
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
