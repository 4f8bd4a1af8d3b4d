"""`training.plugin`: the published entries are built in, a user's are imported, anything else is an error."""

from __future__ import annotations

import pytest

from mm_models.config.fsdp2 import load_config
from mm_models.config.fsdp2.plugins import BUILT_IN, load
from mm_models.errors import UserError
from mm_models.registry import table
from tests.config.fsdp2.kit import SEED


def test_the_published_entries_are_built_in():
    """X1: what they became is said, and what it names is in the registry."""
    assert load(load_config(SEED).training.plugin) == [
        "plugin mindspeed_mm/fsdp/models/glm4_5v: built in, model_id glm4v_moe",
        "plugin mindspeed_mm/fsdp/data/datasets/huggingface: built in, dataset_type huggingface",
    ]
    for entry in BUILT_IN.values():
        key, id = entry.split()
        assert id in table({"model_id": "models", "dataset_type": "datasets"}[key])
    assert load(["mindspeed_mm.fsdp.models.glm4_5v", "mindspeed_mm/fsdp/models/glm4_5v/"])


@pytest.mark.parametrize(
    "entry", ["mindspeed_mm/fsdp/models/glm4_6v", "/no/such.py", "no_such_module_here", "mindspeed_mm/fsdp"]
)
def test_any_other_path_must_exist(entry):
    with pytest.raises(UserError, match=r"training\.plugin: plugin .*" + entry.replace(".", r"\.")):
        load([entry])


def test_a_near_miss_names_the_built_in_one():
    with pytest.raises(UserError, match="Did you mean 'mindspeed_mm/fsdp/models/glm4_5v'"):
        load(["mindspeed_mm/fsdp/models/glm4_5"])


def test_a_plugin_of_the_user_adds_its_entries(tmp_path, monkeypatch):
    """A file and a package folder; its own fault is shown."""
    code = "from mm_models.registry import table\ntable('models').add('{id}', '{module}:MODEL')\nMODEL = '{id}'\n"
    (tmp_path / "plugin_one.py").write_text(code.format(id="toy_one", module="plugin_one"))
    (tmp_path / "plugin_two").mkdir()
    (tmp_path / "plugin_two" / "__init__.py").write_text(code.format(id="toy_two", module="plugin_two"))
    monkeypatch.setattr(table("models"), "_targets", dict(table("models")._targets))
    for _ in range(2):  # a second plan of the same process changes nothing
        lines = load([str(tmp_path / "plugin_one.py"), str(tmp_path / "plugin_two")])
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["loaded", "loaded"]
    assert table("models").get("toy_one") == "toy_one" and table("models").get("toy_two") == "toy_two"
    (tmp_path / "broken.py").write_text("import no_such_module_there\n")
    with pytest.raises(UserError, match=r"training\.plugin: .*broken\.py.*no_such_module_there"):
        load([str(tmp_path / "broken.py")])
