"""The shipped scripts as one chain: what fails ends it with a status, whatever stands behind it in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_glm_config, tiny_model_json
from tests.weights.folders import hf_folder

ROOT = Path(__file__).parents[2]
CONVERT = ROOT / "examples" / "glm4.5v" / "convert_glm4_5v.sh"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with spaces in its path, and a model.json for PP 1."""
    place = tmp_path_factory.mktemp("a place") / "with spaces"
    hf_folder(place / "h f")
    (place / "model.json").write_text(json.dumps(tiny_model_json(tiny_glm_config())))
    return place


def chain(place: Path, script: str, **variables: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {
        "HF_DIR": "h f",
        "MM_DIR": str(place / "m m"),
        "MODEL_JSON": "model.json",
        "PATH": path,
        "SCRIPT": str(CONVERT),
    }
    given |= dict.fromkeys(("TP", "PP", "EP", "ETP"), "1")
    return subprocess.run(
        ["bash", "-c", script], cwd=place, env=given | variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HF_DIR": "no such folder"}, "no such folder"),
        ({"MODEL_JSON": "no such.json"}, "no such.json: no such file"),
        ({"EP": "3"}, "does not divide by ep 3"),
        ({"TP": ""}, "tp 4"),  # unset: the default of the full model, which this one does not divide by
    ],
    ids=str,
)
def test_the_convert_script_stops_a_chain(tiny, variables, words):
    """B71: paths with spaces, from another folder: a failed conversion ends with a status, and what follows does not run."""
    done = chain(tiny, 'set -e; bash "$SCRIPT"; echo training', **variables)
    assert done.returncode == 2 and words in done.stderr and "training" not in done.stdout, done.stderr
    assert not (tiny / "m m").exists()


def test_the_convert_script_succeeds(tiny):
    """B71: the same chain goes on when all is well."""
    done = chain(tiny, 'set -e; bash "$SCRIPT" --overwrite; echo training')
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "training", done.stderr
    assert (tiny / "m m/latest_checkpointed_iteration.txt").read_text() == "release"


@pytest.mark.parametrize("script", sorted((ROOT / "examples").rglob("*.sh")), ids=lambda path: path.name)
def test_every_shipped_script_is_strict(script):
    """B71: an unset variable or a failed command, in a pipe too, ends the script."""
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines or 'source "$HERE/launch.sh"' in lines  # which sets it, after CANN's own script
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
