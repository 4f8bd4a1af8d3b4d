"""The three folders of a run against each other, and where weights come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mm_models.errors import UserError
from mm_models.fsdp2 import sources
from mm_models.weights.mmfolder import TRACKER
from tests.fsdp2.config_kit import run_config, tiny_folders

DCP, HF = "ckpt/mm_path/GLM-4.5V", "ckpt/hf_path/GLM-4.5V"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tiny_folders(tmp_path))
    return tmp_path


def judge(changes: dict | None = None) -> sources.Source:
    config = run_config(changes)
    family, model, _ = sources.read_model(config)
    source = sources.find_source(config, model)
    sources.check_paths(config, family, model, source)
    return source


def refused(words: str, changes: dict | None = None) -> None:
    with pytest.raises(UserError) as caught:
        judge(changes)
    assert words in str(caught.value), caught.value


def edit(path: str, **changes) -> None:
    file = Path(path)
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps(content))


# --- one model --------------------------------------------------------------------------------------------------------


def test_three_folders_of_one_model(here):
    """C14: the published arrangement, and all three keys at one folder."""
    assert judge().kind == "dcp"
    shutil.copytree(HF, "one")
    shutil.copytree(f"{DCP}/release", "one/release")
    Path("one/latest_checkpointed_iteration.txt").write_text("release")
    one = {"model.model_name_or_path": "one", "training.load": "one"}
    assert judge({**one, "data.dataset_param.preprocess_parameters.model_name_or_path": "one"}).folder == Path(
        "one/release"
    )


def test_another_architecture_names_the_field_and_both_values(here):
    """C14: in the tokenizer's folder, and beside the weights."""
    for folder in (HF, f"{DCP}/release"):
        file = Path(folder, "config.json")
        text = Path(HF, "config.json").read_text()
        content = json.loads(text)
        content["text_config"]["num_hidden_layers"] = 6
        file.write_text(json.dumps(content))
        refused(f"text_decoder.num_layers is 4 in {DCP}, 6 in {file}")
        file.unlink()
        Path(HF, "config.json").write_text(text)
    content["model_type"] = "qwen9_vl"
    Path(HF, "config.json").write_text(json.dumps(content))
    refused("model_type 'qwen9_vl' has no converter")


def test_another_tokenizer_is_refused(here):
    """C14: by bytes; what truncation the last user left in tokenizer.json does not count."""
    edit(f"{DCP}/tokenizer.json", truncation={"max_length": 5})
    assert judge()
    edit(f"{DCP}/tokenizer.json", model={"vocab": {"b": 0}})
    refused("tokenizer.json differ: the data would be made with another tokenizer")
    Path(f"{DCP}/tokenizer.json").unlink()
    assert judge()
    for folder, text in ((HF, "a b"), (f"{DCP}/release", "a c")):
        Path(folder, "merges.txt").write_text(text)
    refused("merges.txt differ")


def test_the_model_id_must_be_the_folders(here):
    refused("model.model_id is 'glm4v', but ckpt/mm_path/GLM-4.5V is a 'glm4v_moe'", {"model.model_id": "glm4v"})


def test_folders_that_are_not_there(here):
    """B19: each of the three keys is named, with the nearest folder."""
    text = "data.dataset_param.preprocess_parameters.model_name_or_path"
    refused(f"training.load: {DCP}s: no such folder. Did you mean {DCP}?", {"training.load": f"{DCP}s"})
    refused(f"model.model_name_or_path: {DCP}s: no such folder", {"model.model_name_or_path": f"{DCP}s"})
    refused(f"{text}: {HF}s: no such folder. Did you mean {HF}?", {text: f"{HF}s"})
    refused("has no config.json. Name a Hugging Face folder, or a model.json", {"model.model_name_or_path": "data"})
    refused("is a file, expected a folder", {"training.load": f"{DCP}/config.json"})


# --- where weights come from ------------------------------------------------------------------------------------------


def test_the_parent_or_the_folder_itself(here):
    for load in (DCP, f"{DCP}/release"):
        found = judge({"training.load": load})
        assert (found.kind, found.folder, found.expert_layout) == ("dcp", Path(DCP, "release"), "stacked_hf")
    _iteration(7, "stacked")
    found = judge()
    assert (found.folder, found.expert_layout) == (Path(DCP, "iter_0000007"), "stacked")


def _iteration(number: int, layout: str) -> None:
    folder = Path(DCP, f"iter_{number:07d}")
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"")
    (folder / "manifest.json").write_text(json.dumps({"expert_layout": layout}))
    Path(DCP, TRACKER).write_text(f"{number}\n")


def test_a_tracker_that_leads_nowhere(here):
    Path(DCP, TRACKER).write_text("12")
    refused(
        "training.load: ckpt/mm_path/GLM-4.5V: iter_0000012 is not there, but latest_checkpointed_iteration.txt names it"
    )
    Path(DCP, TRACKER).write_text("latest")
    refused("says 'latest', expected 'release' or an iteration number")
    Path(DCP, TRACKER).unlink()
    refused(f"neither .metadata nor {TRACKER} there")
    Path(DCP, TRACKER).write_text("release")
    Path(DCP, "release/.metadata").unlink()
    refused("is not a DCP checkpoint (load_format dcp): .metadata, or the folder above it with")


def test_load_format_must_agree_with_the_folder(here):
    Path(HF, "model.safetensors").write_bytes(b"")
    hf = {"training.load": HF}
    assert judge({**hf, "training.load_format": "hf"}).kind == "hf"
    assert judge({**hf, "training.load_format": "auto"}).kind == "hf"
    assert judge({"training.load_format": "auto"}).kind == "dcp"
    refused("is not a DCP checkpoint", hf)
    refused(
        "is not a Hugging Face folder (load_format hf): config.json and safetensors", {"training.load_format": "hf"}
    )
    Path("mm/release").mkdir(parents=True)
    Path("mm/release/manifest.json").write_text("{}")
    Path("mm", TRACKER).write_text("release")
    assert judge({"training.load": "mm", "training.load_format": "auto"}).kind == "mm"
    Path("nothing").mkdir()
    refused("it holds nothing", {"training.load": "nothing"})
    refused("training.load: nothing: empty", {"training.load": "nothing", "training.load_format": "auto"})


def test_how_a_dcp_folder_holds_experts_is_declared(here, monkeypatch):
    """X8, X26: by its manifest, else by the file or the published variable; what no model can hold is refused with the command."""
    _iteration(7, "flat")
    refused("experts are flat (its manifest says so), and the model holds stacked_hf or stacked")
    refused("Convert it: mm-convert dcp_to_hf --dcp ckpt/mm_path/GLM-4.5V/iter_0000007")
    _iteration(8, "stacked")
    refused(
        "experts are stacked (its manifest says so), but model.expert_layout is stacked_hf. Set it to stacked",
        {"model.expert_layout": "stacked_hf"},
    )
    Path(DCP, "iter_0000008/manifest.json").unlink()
    monkeypatch.delenv("GLM4V_DCP_3D", raising=False)
    refused("experts are flat (GLM4V_DCP_3D says so; the folder has no manifest)")
    assert judge({"model.expert_layout": "stacked_hf"}).expert_layout == "stacked_hf"
    monkeypatch.setenv("GLM4V_DCP_3D", "1")
    assert judge().expert_layout == "stacked"
    refused("GLM4V_DCP_3D=1 means expert layout stacked", {"model.expert_layout": "stacked_hf"})
    monkeypatch.setenv("GLM4V_DCP_3D", "true")
    refused("it takes 1")


def test_starting_without_load(here):
    """C11: only from_scratch starts without weights; without meta initialisation they are the model folder's own."""
    scratch = judge({"training.load": None, "training.from_scratch": True})
    assert (scratch.kind, scratch.folder) == ("scratch", None) and "random" in scratch.describe()
    own = {"training.load": None, "training.init_model_with_meta_device": False, "training.load_format": "hf"}
    refused("model.model_name_or_path (training.load is null): ckpt/mm_path/GLM-4.5V is not a Hugging Face folder", own)
    Path(HF, "model.safetensors").write_bytes(b"")
    assert judge({**own, "model.model_name_or_path": HF}).kind == "hf"
