"""The quickstart's makers: a complete Hugging Face folder, the same bytes every time, and data that trains it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mm_models.config.data import load_data_config
from mm_models.config.family import family_of
from mm_models.config.model import ModelConfig
from mm_models.data.loader import build_loader
from tests.data import kit


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{"fp32": folder, "bf16": folder, "data": folder}."""
    base = tmp_path_factory.mktemp("quickstart")
    checkpoint, data = kit.quickstart("make_checkpoint"), kit.quickstart("make_data")
    for name, dtype in checkpoint.DTYPES.items():
        checkpoint.write_checkpoint(base / name, dtype=dtype)
    data.write_data(base / "data", base / "fp32")
    return {name: base / name for name in ("fp32", "bf16", "data")}


@pytest.fixture(scope="module")
def model(made):
    from transformers import Glm4vMoeForConditionalGeneration

    found, report = Glm4vMoeForConditionalGeneration.from_pretrained(made["fp32"], output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    return found


def test_the_scripts_write_the_same_bytes_again(made, tmp_path):
    for script, arguments, name in (
        ("make_checkpoint.py", [], "fp32"),
        ("make_data.py", ["--checkpoint", made["fp32"]], "data"),
    ):
        command = [sys.executable, kit.QUICKSTART / script, "--out", tmp_path / name, *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
        first = {path.relative_to(made[name]) for path in made[name].rglob("*")}
        assert first == {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")}
        for path in first:
            if (made[name] / path).is_file() and path.name != "data.json":  # it holds the folder it is in
                assert (made[name] / path).read_bytes() == (tmp_path / name / path).read_bytes(), path


def test_the_folder_is_complete_and_its_index_true(made):
    for name in ("fp32", "bf16"):
        index = json.loads((made[name] / "model.safetensors.index.json").read_text())
        found = tensors(made[name])
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert len(set(index["weight_map"].values())) > 1
        for part in ("config", "generation_config", "tokenizer", "tokenizer_config", "processor_config"):
            assert (made[name] / f"{part}.json").is_file()
        assert (made[name] / "chat_template.jinja").is_file()


def test_no_tensor_keeps_a_default_and_none_repeats_another(made):
    found = tensors(made["fp32"])
    assert all(tensor.float().std() > 0.01 for tensor in found.values())
    assert len({tensor.flatten()[:8].numpy().tobytes() for tensor in found.values()}) == len(found)


def test_dtypes(made):
    assert {tensor.dtype for tensor in tensors(made["fp32"]).values()} == {torch.float32}
    kept = {name for name, tensor in tensors(made["bf16"]).items() if tensor.dtype == torch.float32}
    assert kept == {
        f"model.language_model.layers.{layer}.mlp.gate.{name}"
        for layer in (1, 2, 3)
        for name in ("weight", "e_score_correction_bias")
    }
    assert json.loads((made["bf16"] / "config.json").read_text())["dtype"] == "bfloat16"


def test_it_has_the_shape_the_readme_says(model):
    layers = model.model.language_model.layers
    assert len(layers) == 4 and len(model.model.visual.blocks) == 2
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True, True, True]
    assert model.generation_config.eos_token_id[1] == model.config.image_token_id - 27  # <|user|> in GLM's order


def test_the_data_is_fifteen_photographs_of_the_wheel(made):
    captions = kit.quickstart("captions")
    used = {Path(image).name for row in captions.ROWS for image in row["images"]}
    assert used == set(captions.PHOTOS) and len(captions.PHOTOS) == 15
    source = Path(find_spec("skimage").origin).parent / "data"
    for name in captions.PHOTOS:
        assert (made["data"] / "images" / name).read_bytes() == (source / name).read_bytes()
    counts = [len(row["images"]) for row in captions.ROWS]
    assert min(counts) == 0 and max(counts) == 3 and len(counts) == 16


def test_a_few_steps_lower_the_loss(made, model):
    """The whole way once: photographs, template, positions, labels, Hugging Face's own model."""
    from mm_models.data.processor import load_processor

    config = load_data_config(made["data"] / "data.json")
    loader = build_loader(
        config,
        model_config=kit.model_config(load_processor(made["fp32"])),
        micro_batch_size=4,
        global_batch_size=4,
    )
    assert loader.report.kept == loader.report.rows == 16 and not loader.report.dropped
    assert max(len(sample.ids) for sample in loader.dataset) == 111
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in itertools.islice(loader, 12):
        batch.pop("sample_ids")
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize(
    ("family", "template", "model"),
    [
        ("qwen2_vl", "qwen2vl", "Qwen2VLForConditionalGeneration"),
        ("qwen2_5_vl", "qwen2vl", "Qwen2_5_VLForConditionalGeneration"),
        ("glm4v", "glm4v", "Glm4vForConditionalGeneration"),
    ],
)
def test_the_other_families(tmp_path, family, template, model):
    """Complete, no tensor at a default or twice, tied as it should be; the quickstart's data fits every one of them."""
    import transformers

    kit.quickstart("make_checkpoint").write_checkpoint(tmp_path / "hf", family=family)
    kit.quickstart("make_data").write_data(tmp_path / "data", tmp_path / "hf", template)
    found, report = getattr(transformers, model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored = tensors(tmp_path / "hf")
    assert all(tensor.std() > 0.01 for tensor in stored.values())
    assert len({tensor.flatten()[:8].numpy().tobytes() for tensor in stored.values()}) == len(stored)
    assert ("lm_head.weight" in stored) == (family != "qwen2_5_vl")
    assert found.config.tie_word_embeddings == (family == "qwen2_5_vl")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    loader = build_loader(
        load_data_config(tmp_path / "data" / "data.json"),
        model_config=ModelConfig.model_validate(family_of(raw, "config.json").model_json(raw)),
        micro_batch_size=4,
        global_batch_size=4,
    )
    assert loader.report.kept == loader.report.rows == 16 and not loader.report.dropped
    batch = next(iter(loader))
    batch.pop("sample_ids")
    with torch.no_grad():
        assert 5.5 < found.eval()(**batch).loss < 8  # log(512) = 6.2: a guess among all tokens
