"""Folders of a model that no published family is: converted, resplit and back byte for byte; parts that do not fit refused by name."""

from __future__ import annotations

import json

import pytest

from mm_models.cli import models as cli
from mm_models.config.family import family_of
from mm_models.config.model import ModelConfig, load_model_config
from mm_models.config.strict import validate
from mm_models.errors import UserError
from mm_models.fsdp2.sources import read_model
from mm_models.weights.manifest import open_checkpoint
from tests.composed import MIXES, composed_folder, composed_json
from tests.fsdp2.config_kit import run_config
from tests.models import tiny_config, tiny_model_json
from tests.weights.folders import assert_same_folder, edit_config, resplit, to_hf, to_mm


@pytest.mark.parametrize("mix", MIXES)
def test_there_resplit_and_back(mix, tmp_path):
    hf = composed_folder(tmp_path / "hf", mix)
    layers = composed_json(mix)["image_encoder"]["vision_encoder"]["num_layers"]
    half, rest = layers // 2, layers - layers // 2
    first = to_mm(hf, tmp_path / "tp2pp2", vision=[half, rest], text=[0, 4], tp=2, pp=2)
    lists = {"vision": [[half, 0], [rest, 0]], "text": [[0, 0], [1, 3]]}
    direct = to_mm(hf, tmp_path / "direct", **lists, pp=2, vpp=2)
    second = resplit(first, tmp_path / "pp2vpp2", **lists, pp=2, vpp=2)
    for one, two in zip(sorted(direct.glob("release/*/*.pt")), sorted(second.glob("release/*/*.pt")), strict=True):
        assert one.read_bytes() == two.read_bytes(), one
    third = resplit(second, tmp_path / "tp2", tp=2)
    for name in (first, second, third):
        assert_same_folder(to_hf(name, hf, tmp_path / f"back-{name.name}"), hf)
    sections = open_checkpoint(first).manifest.model
    assert (sections.vision.model_id, sections.text.model_id) == (
        composed_json(mix)["image_encoder"]["vision_encoder"]["model_id"],
        composed_json(mix)["text_decoder"]["model_id"],
    )


@pytest.mark.parametrize("mix", MIXES)
def test_init_writes_its_model_json(mix, tmp_path, capsys):
    hf = composed_folder(tmp_path / "hf", mix)
    assert cli.main(["init", "--hf", str(hf), "--tp", "2", "--pp", "2", "-o", str(tmp_path / "model.json")]) == 0
    model = load_model_config(tmp_path / "model.json")
    assert model.text.pipeline_num_layers == [2, 2]
    assert "composed for --tp 2 --pp 2" in capsys.readouterr().out
    config = json.loads((hf / "config.json").read_text())
    family_of(config, "config.json").check_model(model, config)


def test_what_a_run_may_say_its_own_way(tmp_path):
    config = {"model_type": "composed", "model": composed_json(MIXES[0])}
    family = family_of(config, "config.json")
    changed = composed_json(MIXES[0]) | {"loss_cfg": {"loss_type": "per_token_loss"}, "patch": {"bridge_patch": True}}
    family.check_model(ModelConfig.model_validate(changed | {"model_id": None}), config)
    changed["text_decoder"]["rope_theta"] = 77.0
    with pytest.raises(UserError, match=r"text_decoder.rope_theta is 77.0, config.json says 1000000.0"):
        family.check_model(ModelConfig.model_validate(changed), config)


def sections(family: str) -> dict:
    content = tiny_model_json(tiny_config(family))
    return content["image_encoder"] | {"text_decoder": content["text_decoder"]}


GLM, QWEN = "glm4v", "qwen2_5_vl"
MISFITS = {
    "GlmMLP after qwen2vit": (QWEN, GLM, QWEN, {}, r"GlmMLP takes merged tokens"),
    "lnmlp after glm4v_vit": (GLM, QWEN, QWEN, {}, r"lnmlp takes patches, glm4v_vit gives merged tokens; GlmMLP takes them"),
    "width of the decoder": (
        GLM, GLM, QWEN, {"text_decoder": {"hidden_size": 96, "kv_channels": 16}},
        r"vision_projector gives features of width 64, text_decoder.hidden_size is 96",
    ),
    "width of the tower": (
        QWEN, QWEN, GLM, {"vision_projector": {"input_size": 64}},
        r"vision_projector: input_size 64 and ffn_hidden_size 128, expected the encoder's hidden_size 32",
    ),
    "merged width": (GLM, GLM, QWEN, {"vision_projector": {"out_hidden_size": 96}}, r"out_hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_parts_that_do_not_fit_are_refused_by_name(name):
    tower, projector, decoder, changes, words = MISFITS[name]
    parts = {
        "vision_encoder": sections(tower)["vision_encoder"],
        "vision_projector": sections(projector)["vision_projector"],
        "text_decoder": sections(decoder)["text_decoder"],
    }
    for section, values in changes.items():
        parts[section] |= values
    text = parts.pop("text_decoder")
    with pytest.raises(UserError, match=words):
        validate(ModelConfig, {"img_context_token_id": 300, "image_encoder": parts, "text_decoder": text}, "model.json")


def test_a_folder_that_is_none_of_them(tmp_path):
    hf = composed_folder(tmp_path / "hf", MIXES[0])
    edit_config(hf, lambda config: config.pop("model"))
    with pytest.raises(UserError, match=r"model_type 'composed' needs the content of a model.json under 'model'"):
        to_mm(hf, tmp_path / "mm")


@pytest.mark.parametrize("model_id", [QWEN, "composed"])
def test_the_fsdp2_target_refuses_it(model_id, tmp_path):
    """It trains Hugging Face's own classes, and none holds these parts."""
    hf = composed_folder(tmp_path / "hf", MIXES[0])
    config = run_config({"model.model_id": QWEN, "model.model_name_or_path": str(hf)})
    config = config.model_copy(update={"model": config.model.model_copy(update={"model_id": model_id})})
    with pytest.raises(UserError, match=r"parts that no Hugging Face class holds together"):
        read_model(config)
