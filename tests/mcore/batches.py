"""Micro-batches for the tiny models, as the collator makes them, and Hugging Face's answer to them."""

from __future__ import annotations

import torch

IMAGE, START, END = 300, 302, 303


def batch(
    seed: int = 0,
    *,
    images: list[list[tuple[int, int]]] = (((4, 4),),),
    length: int = 40,
    unlabelled: bool = False,
    features: int = 1176,
    merge: int = 2,
) -> dict:
    """One micro-batch: for each sample its images as (h, w) patch grids; every sample has `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows, labels, grids = [], [], []
    for sample in images:
        ids = torch.randint(5, 290, (length,), generator=generator)
        at = 2
        for h, w in sample:
            n = h * w // merge**2
            ids[at], ids[at + 1 : at + 1 + n], ids[at + 1 + n] = START, IMAGE, END
            at += n + 4
            grids.append((1, h, w))
        assert at < length - 6, (at, length)
        label = ids.clone()
        label[: max(at, length // 3)] = -100
        rows.append(ids)
        labels.append(torch.full_like(label, -100) if unlabelled else label)
    result = {
        "input_ids": torch.stack(rows),
        "labels": torch.stack(labels),
        "attention_mask": torch.ones(len(rows), length, dtype=torch.long),
    }
    if grids:
        result["image_grid_thw"] = torch.tensor(grids)
        result["pixel_values"] = torch.randn(sum(h * w for _, h, w in grids), features, generator=generator)
    result["position_ids"] = positions(result, merge)
    return result


def positions(batch: dict, merge: int = 2) -> torch.Tensor:
    """(3, B, S): the rule of Hugging Face's get_rope_index for text and images, counted token by token."""
    ids, out = batch["input_ids"], []
    grids = iter(batch.get("image_grid_thw", torch.empty(0, 3, dtype=torch.long)).tolist())
    for row in ids.tolist():
        where, at, i = [], 0, 0
        while i < len(row):
            if row[i] != IMAGE:
                where.append((at, at, at))
                at, i = at + 1, i + 1
                continue
            _, h, w = next(grids)
            where += [(at, at + y, at + x) for y in range(h // merge) for x in range(w // merge)]
            at, i = at + max(h, w) // merge, i + h * w // merge**2
        out.append(torch.tensor(where).T)
    return torch.stack(out, dim=1)


def hf_inputs(batch: dict) -> dict:
    """The same micro-batch as Hugging Face's model takes it."""
    inputs = {
        k: v
        for k, v in batch.items()
        if k in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "position_ids")
    }
    inputs["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return inputs | {"use_cache": False}


def hf_sum_loss(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits (B, S, V), summed cross entropy) of Hugging Face's model."""
    logits = model(**hf_inputs(batch)).logits
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = torch.nn.functional.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), shifted.view(-1), ignore_index=-100, reduction="sum"
    )
    return logits, loss
