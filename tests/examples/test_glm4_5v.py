"""model_106B.json and data.json are GLM-4.5V's: every value, every tensor and shape, the parameter count, a layout that fits.

`HUB` is zai-org/GLM-4.5V's config.json, as transformers 4.57 wrote it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mm_models.config.data import load_data_config
from mm_models.config.family import family_of
from mm_models.config.model import load_model_config
from mm_models.layout import ParallelLayout
from mm_models.registry import table
from mm_models.weights.boxes import volume
from mm_models.weights.model_map import build

EXAMPLE = Path(__file__).parents[2] / "examples" / "glm4.5v"
MODEL_JSON, SCRIPT = EXAMPLE / "model_106B.json", EXAMPLE / "finetune_glm4_5v_106B.sh"
PARAMETERS = 107_710_927_360

HUB = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
    "image_token_id": 151363,
    "video_token_id": 151364,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_moe_text",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": False,
        "intermediate_size": 10944,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        "max_position_embeddings": 65536,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338],
    },
    "vision_config": {
        "model_type": "glm4v_moe",
        "depth": 24,
        "hidden_size": 1536,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "intermediate_size": 10944,
        "image_size": 336,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-05,
    },
}


@pytest.fixture(scope="module")
def model():
    return load_model_config(MODEL_JSON)


@pytest.fixture(scope="module")
def hf():
    """The Hugging Face class at full size, on the meta device."""
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    with torch.device("meta"):
        return Glm4vMoeForConditionalGeneration(Glm4vMoeConfig.from_dict(HUB))


@pytest.fixture(scope="module")
def wmap(model):
    return build(model)


def script_defaults() -> dict[str, int]:
    """`NAME=${NAME:-value}` of the launch script and of what it shares."""
    text = (EXAMPLE.parent / "megatron.sh").read_text() + SCRIPT.read_text()
    return {name: int(value) for name, value in re.findall(r"^(\w+)=\$\{\1:-(\d+)\}$", text, re.M)}


def test_every_value_is_the_real_models(model):
    family_of(HUB, "HUB").check_model(model, HUB, "HUB")


def test_init_writes_this_file(tmp_path):
    """The file is what `mm-models init` makes of the config, so it can be made again for another topology."""
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    layers = ["--llm-pp-layers", "[4,6,6,6,7,7,6,4]", "--vit-pp-layers", "[24,0,0,0,0,0,0,0]"]
    command = [
        sys.executable,
        "-m",
        "mm_models.cli.models",
        "init",
        "--hf",
        str(tmp_path),
        "--tp",
        "4",
        "--pp",
        "8",
        "--ep",
        "8",
        "--etp",
        "1",
        *layers,
    ]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(made) == json.loads(MODEL_JSON.read_text())


def test_the_default_topology_fits(model):
    values = script_defaults()
    world = values["NPUS_PER_NODE"] * values["NNODES"]
    layout = ParallelLayout.for_world(
        world, tp=values["TP"], pp=values["PP"], ep=values["EP"], etp=values["ETP"], sequence_parallel=True
    )
    assert (world, layout.dp) == (128, 4)
    model.check_layout(layout)
    split = model.split(layout)
    assert split.vision.nested() == [[24, 0, 0, 0, 0, 0, 0, 0]]
    assert sum(split.text.nested()[0]) == model.text.num_layers == 46


def test_parameter_count(wmap, hf):
    params = [tensor for tensor in wmap.global_tensors().values() if tensor.kind == "param" and not tensor.alias]
    assert sum(volume(tensor.shape) for tensor in params) == sum(p.numel() for p in hf.parameters()) == PARAMETERS


def test_every_hugging_face_tensor_and_shape(wmap, hf):
    """transformers 5 holds experts stacked; 4.57 and the hub hold one tensor each."""
    expected = {name: tuple(tensor.shape) for name, tensor in hf.state_dict().items()}
    assert {name: tensor.shape for name, tensor in wmap.hf("stacked_hf").items()} == expected
    single = wmap.hf("per_expert")
    assert sum(volume(tensor.shape) for tensor in single.values()) == sum(map(volume, expected.values()))
    name = "model.language_model.layers.45.mlp.experts.127."
    assert [single[name + part].shape for part in ("gate_proj.weight", "down_proj.weight")] == [
        (1408, 4096),
        (4096, 1408),
    ]


def test_every_rank_of_the_default_topology_adds_up(wmap, model):
    """Shards over (tp, pp) and (etp, pp, ep) hold every element once, replicated ones once per tp rank."""
    from mm_models.weights.model_map import shard_coords

    layout = ParallelLayout(tp=4, pp=8, ep=8, etp=1)
    split, held = model.split(layout), {}
    for expert, axis in ((False, "tp"), (True, "ep")):
        for pp in range(8):
            for rank in range(getattr(layout, axis)):
                for name, tensor in wmap.local(
                    shard_coords(pp=pp, **{axis: rank}), layout, split, expert=expert
                ).items():
                    held[name] = held.get(name, 0) + volume(tensor.shape)
    for name, tensor in wmap.global_tensors().items():
        copies = 1 if tensor.shard else layout.tp
        assert held.pop(name) == copies * volume(tensor.shape), name
    assert not held


def test_data_json_is_valid_and_names_what_is_registered():
    data = load_data_config(EXAMPLE / "data.json")
    assert data.dataset_param.dataset_type in table("datasets")
    assert data.dataset_param.basic_parameters.template in table("templates")
    assert data.dataloader_param.collate_param.collator in table("collators")
