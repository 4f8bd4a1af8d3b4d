"""Runs of a dense family: the same from every kind of folder, resumed to the bit, and Hugging Face's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_models.cli.convert import main
from tests.fsdp2.test_checkpoint import exact
from tests.fsdp2.trainer_kit import Synthetic, assert_same_step, config, launch, reference, stock, write_hf
from tests.mcore.batches import batch
from tests.models import tiny_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "glm4v")
EVERY = ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl", "glm4v"))]


class Ragged(Synthetic):
    """Images of whole and of ragged windows; every third sample is text alone."""

    def micro_batch(self, ids: list[int], *needs: frozenset[str]) -> dict[str, Any]:
        (id,) = ids
        made = batch(id, images=[[] if id % 3 == 0 else [(4, 6), (2, 8)] if id % 2 else [(6, 10)]])
        made["labels"][0, : 15 + 5 * (id % 3)] = -100
        return {"sample_ids": ids, **made}


def settings(hf: Path, **changes: Any) -> dict[str, Any]:
    return config(hf, **{"training.gradient_accumulation_steps": 2} | changes)


@pytest.mark.parametrize(
    ("family", "nprocs", "steps"),
    [("qwen2_5_vl", 1, 2), *(pytest.param(name, 2, 20, marks=pytest.mark.slow) for name in FAMILIES)],
)
def test_losses_from_hugging_face_and_from_dcp_are_bit_equal(family, nprocs, steps, tmp_path):
    """Level 1, in every spelling of the names and of config.json; a DCP folder without manifest needs no expert layout."""
    old, new = write_hf(tmp_path / "old", family), tmp_path / "new"
    tiny_model(family).save_pretrained(new, save_original_format=False)
    flatten(new / "config.json")
    assert main(["hf_to_dcp", "--hf", str(old), "--out", str(tmp_path / "dcp")]) in (0, None)
    (tmp_path / "dcp" / "release" / "manifest.json").unlink()
    common = {"training.train_iters": steps, "training.use_deter_comp": True}
    sources = [(old, old), (new, tmp_path / "dcp"), (new, new)]
    found = [
        exact(launch(nprocs, settings(hf, **common | {"training.load": str(load)}), tmp_path / f"{at}.jsonl", Ragged()))
        for at, (hf, load) in enumerate(sources)
    ]
    assert len(found[0]) == steps and found[0] == found[1] == found[2]


def flatten(file: Path) -> None:
    """Text fields at the root, as the hub's files of Qwen have them; GLM's stay inside."""
    content = json.loads(file.read_text())
    if content["model_type"].startswith("qwen"):
        text = content.pop("text_config")
        content = {key: value for key, value in text.items() if key not in ("model_type", "dtype")} | content
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("family", EVERY)
def test_a_resumed_run_equals_the_unbroken_one_and_hugging_face(family, tmp_path):
    """Tied, on two ranks. Weights at the end are those of a plain Hugging Face loop."""
    hf = write_hf(tmp_path / "hf", family, tie_word_embeddings=True)
    save = {"training.save": str(tmp_path / "a"), "training.save_interval": 2}
    whole = launch(2, settings(hf, **save), tmp_path / "a.jsonl", Ragged())
    again = {"training.load": str(tmp_path / "a" / "iter_0000002"), "training.save": str(tmp_path / "b")}
    rest = launch(2, settings(hf, **again), tmp_path / "b.jsonl", Ragged())
    assert exact(rest) == exact(whole[2:])
    one, two = (stock(tmp_path / name / "iter_0000004") for name in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    want = reference(hf, steps=4, batch=4, samples=Ragged())
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in want["records"]], rel=1e-5)
    assert [r["grad_norm"] for r in whole] == pytest.approx([r["grad_norm"] for r in want["records"]], rel=1e-4)
    assert_same_step({name: one[f"model.{name}"] for name in want["weights"]}, want["weights"], steps=4)
