"""`mm-models`: the registry's listing (golden, so that an id never disappears), one id taken apart, and a model.json."""

from __future__ import annotations

import json

import pytest

from mm_models.cli.models import main
from mm_models.config.model import load_model_config
from mm_models.layout import ParallelLayout
from mm_models.registry import TABLES
from tests.weights.folders import hf_folder

VISION, PROJECTORS = ["glm4v_vit", "qwen2_5_vit", "qwen2vit"], ["GlmMLP", "lnmlp"]
TEXT = ["glm4v_lm", "glm4v_moe_lm", "qwen2_5_lm", "qwen2lm"]
EXPECTED = {
    "vision_encoders": VISION,
    "vision_projectors": PROJECTORS,
    "text_decoders": TEXT,
    "vit_layer_specs": VISION,
    "llm_layer_specs": TEXT,
    "sections": sorted([*VISION, *PROJECTORS, *TEXT]),
    "weight_maps": sorted([*VISION, *PROJECTORS, *TEXT]),
    "converters": ["Glm4vMoeConverter", "GlmConverter", "Qwen2VLConverter", "Qwen2_5_VLConverter"],
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "tiny")


def listed(capsys, *arguments: str) -> dict[str, list[str]]:
    assert main(["list", *arguments]) == 0
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        table, id, target = line.split()
        assert target.count(":") == 1
        found.setdefault(table, []).append(id)
    return found


def test_every_id_is_listed(capsys):
    found = listed(capsys)
    assert set(found) <= set(TABLES)
    for table, ids in EXPECTED.items():
        assert set(ids) <= set(found[table]), table


def test_one_table(capsys):
    assert listed(capsys, "--table", "weight_maps") == {"weight_maps": EXPECTED["weight_maps"]}
    assert main(["list", "--table", "weight_map"]) == 2
    assert "did you mean 'weight_maps'?" in capsys.readouterr().err


def test_one_id_taken_apart(capsys):
    assert main(["show", "glm4v_moe_lm"]) == 0
    text = capsys.readouterr().out
    for words in (
        "text_decoders",
        "llm_layer_specs",
        "num_query_groups",
        "num_key_value_heads",
        "linear_qkv.weight",
        "expert_glu",
    ):
        assert words in text
    assert main(["show", "glm4v_moe_ln"]) == 2
    assert "did you mean 'glm4v_moe_lm'?" in capsys.readouterr().err


def test_an_id_of_two_families_shows_both(capsys):
    assert main(["show", "qwen2vit"]) == 0
    text = capsys.readouterr().out
    assert "Qwen2VLConverter: model.json section vision_encoder" in text and "Qwen2_5_VLConverter: model.json" in text
    assert "mlp_ratio x hidden_size" in text and "mlp.fc1.weight" in text and "mlp.gate_proj.bias" in text


def test_init_writes_a_model_json_for_a_topology(hf, tmp_path, capsys):
    out = tmp_path / "model.json"
    assert main(["init", "--hf", str(hf), "--tp", "2", "--pp", "4", "-o", str(out)]) == 0
    model = load_model_config(out)
    assert model.text.pipeline_num_layers == [1, 1, 1, 1] and model.vision.pipeline_num_layers == [2, 0, 0, 0]
    assert model.text.kv_channels == 32 and model.text.num_moe_experts == 8
    model.split(ParallelLayout(tp=2, pp=4))
    assert main(["init", "--hf", str(hf), "-o", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (
        main(["init", "--hf", str(hf / "config.json"), "--pp", "2", "--vpp", "2", "--llm-pp-layers", "[[1,1],[1,1]]"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["text_decoder"]["pipeline_num_layers"] == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst"], "did you mean 'list'?"),
        (["init", "--hf", "/nowhere"], "/nowhere: no such file"),
        (["init", "--hf", "{hf}", "--tp", "3"], "does not divide by tp 3"),
        (["init", "--hf", "{hf}", "--tp", "2", "--tp", "2"], "given twice"),
        (["list", "--tabel", "x"], "did you mean '--table'?"),
    ],
    ids=str,
)
def test_refusals(hf, capsys, arguments, words):
    assert main([argument.format(hf=hf) for argument in arguments]) == 2
    assert words in capsys.readouterr().err


def test_init_tells_of_keys_it_does_not_use(hf, tmp_path, capsys):
    config = json.loads((hf / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["init", "--hf", str(tmp_path), "-o", str(tmp_path / "model.json")]) == 0
    said = capsys.readouterr().err
    assert "not used: text_config.quantization_config.bits" in said
