"""GLM-4.1V in MindSpeed-MM's layout, written down by hand from its converter's table: ours is the same, and theirs comes back.

That tool keeps the tower's attention as Hugging Face has it (`qkv`, `proj`), and gate and up of both MLPs in one tensor.
"""

from __future__ import annotations

import re

import pytest
import torch

from mm_models.cli.convert import main
from tests.weights.folders import assert_same_folder, hf_folder, loaded, state_of, to_mm

TOWER = {"norm1": "input_layernorm", "norm2": "pre_mlp_layernorm", "attn.qkv": "self_attention.qkv",
         "attn.proj": "self_attention.proj", "mlp.down_proj": "mlp.linear_fc2"}  # fmt: skip
DECODER = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
           "post_self_attn_layernorm": "post_self_attn_layernorm", "post_mlp_layernorm": "post_mlp_layernorm",
           "self_attn.o_proj": "self_attention.linear_proj", "mlp.gate_up_proj": "mlp.linear_fc1",
           "mlp.down_proj": "mlp.linear_fc2"}  # fmt: skip
ENDS = {"post_layernorm": "blocks.final_layernorm"}


def field_files(state: dict[str, torch.Tensor], groups: int, first: int) -> list[dict[str, torch.Tensor]]:
    """The two stages of PP2: the tower and `first` decoder layers on stage 0, the rest on stage 1, layers counted from 0 on each."""
    state, stages = dict(state), [{}, {}]
    vision, text = "image_encoder.encoder.", "text_decoder."
    for name in [name for name in state if ".visual.blocks." in name and "gate_proj" in name]:
        layer = re.search(r"blocks\.(\d+)\.", name)[1]
        fused = torch.cat([state.pop(name), state.pop(name.replace("gate_proj", "up_proj"))])
        stages[0][f"{vision}blocks.layers.{layer}.mlp.linear_fc1.weight"] = fused
    for name in [name for name in state if ".q_proj." in name]:
        layer, kind = re.search(r"layers\.(\d+)\..*\.(weight|bias)", name).groups()
        q, k, v = (state.pop(name.replace("q_proj", f"{part}_proj")).chunk(groups) for part in "qkv")
        fused = torch.cat([part for group in zip(q, k, v) for part in group])
        state[f"model.language_model.layers.{layer}.QKV.{kind}"] = fused
    for name, tensor in state.items():
        bare, _, kind = name.rpartition(".")
        if found := re.match(r"model\.visual\.blocks\.(\d+)\.(.*)", bare):
            stages[0][f"{vision}blocks.layers.{found[1]}.{TOWER[found[2]]}.{kind}"] = tensor
        elif found := re.match(r"model\.language_model\.layers\.(\d+)\.(.*)", bare):
            layer = int(found[1])
            part = "self_attention.linear_qkv" if found[2] == "QKV" else DECODER[found[2]]
            local = layer if layer < first else layer - first
            stages[layer >= first][f"{text}decoder.layers.{local}.{part}.{kind}"] = tensor
        elif bare.startswith("model.visual.merger."):
            stages[0][name.replace("model.visual.merger.", "image_encoder.projector.")] = tensor
        elif bare.startswith("model.visual."):
            part = bare.removeprefix("model.visual.")
            stages[0][f"{vision}{ENDS.get(part, part)}.{kind}"] = tensor
        elif bare == "model.language_model.embed_tokens":
            stages[0][f"{text}embedding.word_embeddings.weight"] = tensor
        else:
            end = {"model.language_model.norm": "decoder.final_layernorm", "lm_head": "output_layer"}[bare]
            stages[1][f"{text}{end}.weight"] = tensor
    return stages


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "tiny", family="glm4v")


def test_ours_is_theirs(hf, tmp_path):
    files = loaded(to_mm(hf, tmp_path / "mm", vision=[2, 0], text=[1, 3], pp=2))
    for stage, expected in enumerate(field_files(state_of(hf), groups=2, first=1)):
        got = files[f"mp_rank_00_00{stage}", 0]
        assert set(got) == set(expected)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_theirs_comes_back_byte_for_byte(hf, tmp_path):
    mm = tmp_path / "theirs"
    for stage, tensors in enumerate(field_files(state_of(hf), groups=2, first=1)):
        folder = mm / "release" / f"mp_rank_00_00{stage}"
        folder.mkdir(parents=True)
        torch.save({"model": tensors, "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    (mm / "latest_checkpointed_iteration.txt").write_text("release")
    flags = ["--cfg.parallel_config.llm_pp_layers", "[1,3]", "--cfg.parallel_config.vit_pp_layers", "[2,0]"]
    command = ["GlmConverter", "mm_to_hf", "--cfg.mm_dir", str(mm), "--cfg.hf_config.hf_dir", str(hf)]
    assert main([*command, "--cfg.save_hf_dir", str(tmp_path / "out"), *flags]) == 0
    assert_same_folder(tmp_path / "out", hf)
