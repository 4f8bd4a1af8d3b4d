"""Folders the weight tests convert: tiny Hugging Face folders as transformers writes them, and ways to look at them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mm_models.config.family import family_of
from mm_models.layout import ParallelLayout
from mm_models.weights import dcp_verbs, verbs
from mm_models.weights.manifest import open_checkpoint
from mm_models.weights.mmfolder import container
from tests.models import tiny_model

QUIET = verbs.Options(say=lambda text: None)


def model_of(seed: int = 0, dtype: torch.dtype = torch.bfloat16, family: str = "glm4v_moe", **overrides):
    """A tiny model, made once per set of arguments."""
    return _model_of(family, seed, dtype, json.dumps(overrides))


@cache
def _model_of(family: str, seed: int, dtype: torch.dtype, overrides: str):
    return tiny_model(family, seed, dtype, **json.loads(overrides))


def hf_folder(
    path: Path, *, dtype=torch.bfloat16, stacked: bool = False, shard_size: str = "5GB", seed: int = 0, **overrides
) -> Path:
    """`save_pretrained` of the tiny model of `family` (GLM-4.5V), in one file or several: as on the hub (per expert; Qwen's old
    names), or `stacked`, as transformers names it in memory."""
    model_of(seed, dtype, **overrides).save_pretrained(
        path, save_original_format=not stacked, max_shard_size=shard_size
    )
    return path


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def edit_state(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the one weight file of a folder after `change`."""
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", {"format": "pt"})


def edit_config(path: Path, change: Callable[[dict], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def model_config(path: Path):
    config = json.loads((path / "config.json").read_text())
    return family_of(config, str(path)).model(config)


def to_mm(hf: Path, out: Path, *, vision=None, text=None, **layout) -> Path:
    target = verbs.Target(layout=ParallelLayout(**layout), vision_layers=vision, text_layers=text)
    verbs.hf_to_mm(hf, out, target, options=QUIET)
    return out


def to_hf(mm: Path, hf: Path, out: Path, **options) -> Path:
    verbs.mm_to_hf(open_checkpoint(mm), hf, out, options=QUIET, **options)
    return out


def to_dcp(hf: Path, out: Path, *, expert_layout: str | None = None, **options) -> Path:
    dcp_verbs.hf_to_dcp(hf, out, expert_layout=expert_layout, options=QUIET, **options)
    return out


def from_dcp(dcp: Path, hf: Path, out: Path, **options) -> Path:
    dcp_verbs.dcp_to_hf(dcp, hf, out, options=QUIET, **options)
    return out


def resplit(mm: Path, out: Path, *, vision=None, text=None, **layout) -> Path:
    target = verbs.Target(layout=ParallelLayout(**layout), vision_layers=vision, text_layers=text)
    verbs.resplit(open_checkpoint(mm), out, target, options=QUIET)
    return out


def loaded(mm: Path) -> dict[tuple[str, int], Mapping[str, torch.Tensor]]:
    """(rank folder, chunk) -> tensors by the file's own keys, read by torch itself."""
    checkpoint = open_checkpoint(mm)
    found = {}
    for file in sorted(checkpoint.folder.glob("*/model_optim_rng.pt")):
        content = torch.load(file, weights_only=True)
        for chunk in range(checkpoint.manifest.layout.vpp):
            found[file.parent.name, chunk] = content[container(checkpoint.manifest.layout, chunk)]
    return found


def assert_same_folder(got: Path, expected: Path) -> None:
    """Every file of `expected` is in `got`, byte for byte."""
    for file in expected.iterdir():
        assert (got / file.name).read_bytes() == file.read_bytes(), file.name


def copy(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to
