"""The shipped scripts as one chain: what fails ends it with a status, whatever stands behind it in a pipe."""

from __future__ import annotations

import json
import os
import re
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


SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
SOURCED = ("launch.sh", "megatron.sh", "fsdp2.sh", "convert.sh", "sizes.sh")
"""Parts of other scripts. Strict mode begins in the first or the fourth of them, after CANN's own script."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_shipped_script_is_strict(script):
    """B71: an unset variable or a failed command, in a pipe too, ends the script."""
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert os.access(script, os.X_OK) is (script.name not in SOURCED)
    if script.name not in ("megatron.sh", "fsdp2.sh", "sizes.sh"):
        strict = re.compile(r'(set -euo pipefail|source "\$HERE/\.\./(megatron|fsdp2|convert)\.sh")')
        assert any(strict.fullmatch(line) for line in script.read_text().splitlines())


@pytest.mark.parametrize("script", ["megatron.sh", "fsdp2.sh"])
def test_what_starts_a_training_sources_strict_mode_first(script):
    """B71: nothing but the two folders is worked out before it."""
    lines = [
        line for line in (ROOT / "examples" / script).read_text().splitlines() if line and not line.startswith("#")
    ]
    assert [line.split("=")[0] for line in lines[:2]] == ["EXAMPLES", "ENTRY"]
    assert lines[2] == 'source "$EXAMPLES/launch.sh"'
