"""The full-size model.json of Qwen2-VL, Qwen2.5-VL and GLM-4.1V: every value, tensor and shape, the parameter count, a layout that fits.

`full_size.py` has what the published folders say. Everything is on the meta device or a sum of shapes; there are no weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from mm_models.cli.models import main
from mm_models.config.data import load_data_config
from mm_models.config.family import family_of, family_of_model
from mm_models.config.model import load_model_config
from mm_models.layout import ParallelLayout
from mm_models.registry import table
from mm_models.weights.boxes import volume
from mm_models.weights.model_map import build, shard_coords
from tests.examples.full_size import ALL, FullSize

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = ("qwen2vl", "qwen2.5vl", "glm4.1v")
each = pytest.mark.parametrize("full", ALL, ids=str)


def model_json(full: FullSize) -> Path:
    return EXAMPLES / full.folder / f"model_{full.size}.json"


def test_every_shipped_file_is_here():
    found = {str(path) for folder in FOLDERS for path in (EXAMPLES / folder).glob("model_*.json")}
    assert found == {str(model_json(full)) for full in ALL}


@each
def test_init_writes_this_file(full, tmp_path, capsys):
    """Every value is the published model's, every effective key is there, and no other."""
    (tmp_path / "config.json").write_text(json.dumps(full.config))
    lists = ["--llm-pp-layers", str(full.llm), "--vit-pp-layers", str(full.vit)]
    assert main(["init", "--hf", str(tmp_path), "--tp", str(full.tp), "--pp", str(len(full.llm)), *lists]) == 0
    content = json.loads(model_json(full).read_text())
    assert json.loads(capsys.readouterr().out) == content
    said = []
    model = load_model_config(model_json(full), said.append)
    assert not said
    family_of(full.config, "config.json").check_model(model, full.config, "config.json")
    assert family_of_model(model).name == full.converter


@each
def test_parameter_count(full):
    tensors = build(load_model_config(model_json(full))).global_tensors().values()
    assert sum(volume(one.shape) for one in tensors if one.kind == "param" and not one.alias) == full.parameters


SMALLEST = [
    pytest.param(full, id=str(full), marks=() if full.size in ("2b", "3b", "9b") else pytest.mark.slow) for full in ALL
]


@pytest.mark.parametrize("full", SMALLEST)
def test_every_hugging_face_tensor_and_shape(full):
    """The whole weight map against Hugging Face's class at full size. A tied head is no tensor of its own."""
    with torch.device("meta"):
        hf = getattr(transformers, f"{full.model}ForConditionalGeneration")(
            transformers.AutoConfig.for_model(**full.config)
        )
    hf.tie_weights()
    expected = {name: tuple(tensor.shape) for name, tensor in hf.state_dict().items()}
    model = load_model_config(model_json(full))
    if model.tied:
        assert expected.pop("lm_head.weight") == expected["model.language_model.embed_tokens.weight"]
    assert {name: tensor.shape for name, tensor in build(model).hf("stacked_hf").items()} == expected
    assert sum(p.numel() for p in hf.parameters()) == full.parameters


@each
def test_the_split_is_valid_and_every_rank_adds_up(full):
    """Shards over (tp, pp) of the example's layout hold every element once, replicated ones once per tp rank, a tied head twice."""
    model = load_model_config(model_json(full))
    layout = ParallelLayout(tp=full.tp, pp=len(full.llm))
    model.check_layout(layout)
    split, wmap, held = model.split(layout), build(model), {}
    assert split.vision.nested() == [full.vit] and split.text.nested() == [full.llm]
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for name, tensor in wmap.local(shard_coords(pp=pp, tp=tp), layout, split, expert=False).items():
                held[name] = held.get(name, 0) + volume(tensor.shape)
    for name, tensor in wmap.global_tensors().items():
        if name in held:
            assert held.pop(name) == (1 if tensor.shard else layout.tp) * volume(tensor.shape), name
        else:
            assert tensor.alias and layout.pp == 1, name  # one parameter with the embedding
    assert not held


DEGREES = {"qwen2vl-2b": (1, 2), "qwen2.5vl-3b": (1, 2), "qwen2vl-7b": (1, 2, 4), "qwen2.5vl-7b": (1, 2, 4)}
DEGREES |= dict.fromkeys(("qwen2vl-72b", "qwen2.5vl-32b", "qwen2.5vl-72b"), (1, 2, 4, 8)) | {"glm4.1v-9b": (1, 2)}
"""TP that each README names. The key-value heads are the bound."""


@each
def test_the_tensor_parallel_degrees_of_the_readme(full):
    from mm_models.errors import UserError

    model, fits = load_model_config(model_json(full)), []
    for tp in (1, 2, 3, 4, 5, 6, 7, 8, 16):
        try:
            model.check_layout(ParallelLayout(tp=tp, pp=len(full.llm)))
            fits.append(tp)
        except UserError as error:
            assert f"tp {tp}" in str(error)
    assert tuple(fits) == DEGREES[str(full)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_data_json_names_what_is_registered(folder):
    data = load_data_config(EXAMPLES / folder / "data.json")
    assert data.dataset_param.dataset_type in table("datasets")
    assert data.dataset_param.basic_parameters.template in table("templates")
    assert data.dataloader_param.collate_param.collator in table("collators")


@each
def test_the_scripts_know_the_topology(full):
    """`sizes.sh` has the layout of the size's model.json, processes that it divides, and a folder of that name."""
    folder = EXAMPLES / full.folder
    program = f'HERE={folder}; SIZE={full.size}; set -eu; source "$HERE/sizes.sh"; '
    program += 'echo "$TP $PP $((NPUS_PER_NODE * NNODES % (TP * PP))) $MODEL_JSON $NAME"'
    path = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", program], env=path, check=True, capture_output=True, text=True)
    tp, pp, rest, path, name = done.stdout.split()
    assert (int(tp), int(pp), rest, path) == (full.tp, len(full.llm), "0", str(model_json(full)))
    assert full.size.upper() in name
    assert len(list(folder.glob(f"finetune_*_{full.size}.sh"))) == 1
    (convert,) = folder.glob("convert_*.sh")
    assert re.search(rf"^CONVERTER={full.converter}$", convert.read_text(), re.M)
