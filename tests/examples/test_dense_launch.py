"""The scripts of Qwen2-VL, Qwen2.5-VL and GLM-4.1V, run small on CPU processes, from another folder, spaces in paths.

What all launch scripts share (log, status, signals, nodes) is in `test_glm4_5v_launch.py`; here is what these add.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.examples.kit import CLOSING, FIELD_GBS, ROOT, make_place, mm_models, refused, script, shell

EXAMPLES = ROOT / "examples"
FAMILIES = {
    "qwen2_vl": ("qwen2vl", "qwen2vl", "qwen2vl"),
    "qwen2_5_vl": ("qwen2.5vl", "qwen2_5_vl", "qwen2vl"),
    "glm4v": ("glm4.1v", "glm4_1v", "glm4v"),
}
"""Family -> folder, how its scripts are called, template."""
RUNS = {
    "qwen2_vl": ("7b", {"TP": "2", "PP": "1", "NPUS_PER_NODE": "2"}, 2),
    "qwen2_5_vl": ("3b", {"TP": "1", "PP": "1", "NPUS_PER_NODE": "4"}, 8),
    "glm4v": ("9b", {"TP": "1", "PP": "2", "NPUS_PER_NODE": "2"}, 2),
}
"""Family -> size, topology, global batch at MBS 1 and GRAD_ACC_STEP 2. The second is the four-card launch of the 3B."""

pytestmark = pytest.mark.slow  # each starts the whole launch script


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Family -> a folder with spaces: `h f` (bf16), `da ta/data.json`, `model.json`, and `m m`, converted by its script."""
    made: dict[str, Path] = {}

    def place(family: str) -> Path:
        if family not in made:
            folder, name, template = FAMILIES[family]
            at = make_place(tmp_path_factory.mktemp("a place"), family, template)
            layout = {key: RUNS[family][1][key] for key in ("TP", "PP")}
            mm_models(at, "init", "--hf", "h f", "--tp", layout["TP"], "--pp", layout["PP"], "-o", "model.json")
            convert = EXAMPLES / folder / f"convert_{name}.sh"
            done = script(at, convert, HF_DIR="h f", MM_DIR="m m", MODEL_JSON="model.json", **layout)
            assert done.returncode == 0, done.stderr
            made[family] = at
        return made[family]

    return place


def train(place: Path, cwd: Path, family: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    folder, name, _ = FAMILIES[family]
    size, layout, _ = RUNS[family]
    given = {"NNODES": "1", "GRAD_ACC_STEP": "2", "TRAIN_ITERS": "2"} | layout
    given |= {"MODEL_JSON": str(place / "model.json"), "DATA_JSON": str(place / "da ta" / "data.json")}
    given |= {"LOAD": str(place / "m m"), "SAVE": str(cwd / "sa ve")}
    return script(cwd, EXAMPLES / folder / f"finetune_{name}_{size}.sh", *arguments, **(given | variables))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_run(places, tmp_path, family):
    """Converted and launched by the shipped scripts; the global batch is MBS x GRAD_ACC_STEP x DP."""
    done = train(places(family), tmp_path, family)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "logs").iterdir()
    assert [line[: line.index(":") + 2] for line in log.read_text().splitlines()[-2:]] == list(CLOSING)
    assert int(shell(FIELD_GBS, log)) == RUNS[family][2]
    assert (tmp_path / "sa ve" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_what_does_not_fit_is_refused_before_anything_starts(places, tmp_path):
    """Context parallelism by name; a layout that is not LOAD's; experts that the model does not have."""
    place = places("glm4v")
    for variables, texts in (
        ({"CP": "2"}, ("CP is '2'", "context parallelism is not there yet")),
        ({"MBS": "x"}, ("MBS is 'x'",)),
        ({"TP": "2", "NPUS_PER_NODE": "4"}, ("mm-convert resplit",)),
        ({"EP": "2", "ETP": "1", "NPUS_PER_NODE": "4"}, ("the model has no experts",)),
    ):
        refused(train(place, tmp_path, "glm4v", **variables), *texts)
        assert not list(tmp_path.iterdir())


def test_the_conversion_script_chooses_size_and_target(places, tmp_path):
    place = places("qwen2_5_vl")
    convert = EXAMPLES / "qwen2.5vl" / "convert_qwen2_5_vl.sh"
    done = script(place, convert, TARGET="fsdp2", HF_DIR="h f", MM_DIR=str(tmp_path / "d c p"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "d c p" / "release" / ".metadata").is_file()
    for variables, text in (
        ({"SIZE": "8b"}, "SIZE is '8b', expected 3b, 7b, 32b or 72b"),
        ({"TARGET": "fsdp"}, "TARGET is 'fsdp', expected megatron or fsdp2"),
        ({"SIZE": "3b", "HF_DIR": "h f", "MM_DIR": str(tmp_path / "m m")}, "model.json disagrees with"),
    ):
        done = script(place, convert, **variables)
        assert done.returncode == 2 and text in done.stderr, done.stderr
    assert not (tmp_path / "m m").exists()


def test_the_fsdp2_script(places, tmp_path):
    place, data = places("qwen2_5_vl"), "data.dataset_param"
    keys = {
        f"{data}.preprocess_parameters.model_name_or_path": place / "h f",
        f"{data}.preprocess_parameters.image_max_pixels": 12544,
        f"{data}.basic_parameters.dataset_dir": place / "da ta",
        f"{data}.basic_parameters.dataset": place / "da ta" / "train.json",
        "data.dataloader_param.num_workers": 0,
        "model.model_name_or_path": place / "h f",
        "training.load": place / "h f",
        "training.load_format": "hf",
        "training.save": tmp_path / "sa ve",
        "training.train_iters": 2,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    launch = EXAMPLES / "qwen2.5vl" / "finetune_qwen2_5_vl_7b_fsdp2.sh"
    done = script(tmp_path, launch, *words, NPUS_PER_NODE="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[: line.index(":") + 2] for line in done.stdout.splitlines()[-2:]] == list(CLOSING)
    assert (tmp_path / "sa ve" / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.timeout(600)
def test_the_first_run(tmp_path):
    """Mock data, a small model of the 3B's proportions, 20 steps, from the Hugging Face folder and back to one."""
    work = tmp_path / "first run"
    done = script(tmp_path, EXAMPLES / "qwen2.5vl" / "first_run.sh", timeout=580, WORK=str(work))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("first run: converted, loaded, trained 20 steps, saved and exported")
    shards = sorted(path.name for path in (work / "run" / "iter_0000020").glob("mp_rank_*"))
    assert shards == ["mp_rank_00_000", "mp_rank_00_001"]
    assert len(re.findall(r"^ \[.*iteration +\d+/ +20 ", done.stdout, re.M)) == 20
    again = script(tmp_path, EXAMPLES / "qwen2.5vl" / "first_run.sh", WORK=str(work))
    assert again.returncode == 2 and "exists; remove it" in again.stderr
