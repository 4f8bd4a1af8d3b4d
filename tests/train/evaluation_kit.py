"""What the evaluation tests of both targets share: a validation split beside the quickstart's data, and Hugging Face's loss on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mm_models.config.data import load_data_config
from mm_models.config.model import load_model_config
from mm_models.data.loader import build_loader
from tests.data.kit import quickstart
from tests.mcore.batches import hf_inputs
from tests.mcore.training_kit import BATCH, World

TEXT = 14
"""The quickstart's row without an image."""
SPLIT = (TEXT, 0, TEXT, 9, 15, 1, 4, 11, 3)
"""Two whole global batches and a row that is left over; of two ranks one sees text alone in the first."""


def with_split(world: World, rows: tuple[int, ...] = SPLIT) -> Path:
    """data.json with `val_dataset`: these rows of the quickstart."""
    name = f"val_{'_'.join(map(str, rows))}"
    (world.folder / f"{name}_rows.json").write_text(json.dumps([quickstart("captions").ROWS[row] for row in rows]))
    return world.data(name, val_dataset=str(world.folder / f"{name}_rows.json"))


def apart(records: list[dict]) -> tuple[list[dict], dict[int, tuple[float, int]]]:
    """The iterations of a metrics file, and iteration -> (validation loss, trained tokens)."""
    trained = [record for record in records if "loss" in record]
    found = {r["iteration"]: (r["validation_loss"], r["validation_tokens"]) for r in records if "validation_loss" in r}
    assert len(trained) + len(found) == len(records)
    return trained, found


def watch() -> None:
    """From now on in this process: modules in training have gradients, modules in evaluation none."""

    def check(module: torch.nn.Module, _) -> None:
        assert torch.is_grad_enabled() == module.training, type(module)

    torch.nn.modules.module.register_module_forward_pre_hook(check)


def same(one: Any, other: Any) -> bool:
    """Whether two trees of plain values and tensors are equal bit by bit."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def hugging_face(rank: int, folder: str, model: str, data: str, batches: int) -> tuple[float, int]:
    """(loss of a token, trained tokens) of Hugging Face's own model over the first `batches` global batches."""
    from transformers import AutoModelForImageTextToText

    network = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    network.set_experts_implementation("grouped_mm")
    loader = build_loader(
        load_data_config(data), split="valid", model_config=load_model_config(model), global_batch_size=BATCH
    )
    rows, total, tokens = iter(loader), 0.0, 0
    with torch.no_grad():
        for number in range(batches * BATCH):
            row: dict[str, Any] = next(rows)
            assert row["sample_ids"] == [number]
            logits, labels = network(**hf_inputs(row)).logits[0, :-1], row["labels"][0, 1:]
            taken = -torch.log_softmax(logits.double(), dim=-1)[labels != -100, labels[labels != -100]]
            total, tokens = total + taken.sum().item(), tokens + len(taken)
    return total / tokens, tokens
