"""The loss by hand and by Hugging Face: how a batch is cut, padded and labelled changes nothing that it should not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mm_models.data.collator import NEEDS
from mm_models.data.positions import mrope
from tests.field.kit import agree, gradients, stepped
from tests.harness import run
from tests.mcore.batches import IMAGE, batch, hf_inputs
from tests.mcore.cases import assemble, relative_gradients, train_step, wrap
from tests.mcore.test_training import DISTRIBUTED, SP, topology
from tests.mcore.training_kit import Synthetic, launch_synthetic, printed, tiny_flags
from tests.models import tiny_glm_model

# --- B09 ------------------------------------------------------------------------------------------------------------

SHORT, LONG = 3, 9


@dataclass(frozen=True, kw_only=True)
class ShortAndLong(Synthetic):
    """Samples of 3 (odd ids) and 9 (even ids) supervised tokens."""

    def micro_batch(self, ids, needs=NEEDS):
        made = super().micro_batch(ids, needs)
        if "labels" in made:
            for row, id in enumerate(ids):
                made["labels"][row, 20 + (SHORT if id % 2 else LONG) :] = -100
                made["labels"][row, :20] = -100
        return made


CUTS = {
    # name: (processes, flags, micro-batch size, micro-batches of the step)
    "bs2": (1, [], 2, [(1, 2)]),
    "bs1·acc2": (1, [], 1, [(1,), (2,)]),
    "dp2": (2, [], 1, [(1,), (2,)]),
    "dp2·acc2": (2, [DISTRIBUTED], 1, [(1,), (2,), (4,), (5,)]),
    "dp2·bs2": (2, [], 2, [(1, 2), (4, 5)]),
    "pp2·acc2": (2, topology(pp=2), 1, [(1,), (2,)]),
    "ep2": (2, topology(ep=2), 1, [(1,), (2,)]),
    "tp2·bs2": (2, [*topology(tp=2), SP], 2, [(1, 2)]),
}


@pytest.mark.parametrize(
    ("mode", "cut"),
    [("per_token_loss", cut) for cut in CUTS] + [("default", cut) for cut in ("bs2", "bs1·acc2", "dp2·bs2")],
)
def test_short_and_long_answers(hf, tmp_path, mode, cut):
    """B09: 3 and 9 supervised tokens, however the batch is cut. By token the loss is the sum over 12 and the gradient the
    same everywhere; the default is the mean of the micro-batches' means. The printed loss is the one that was optimised."""
    nprocs, flags, size, window = CUTS[cut]
    order = tuple(id for ids in window for id in ids)
    provider = ShortAndLong(order=order)
    tokens = {id: SHORT if id % 2 else LONG for id in order}
    total = sum(tokens.values())
    divisors = [total if mode == "per_token_loss" else sum(tokens[id] for id in ids) * len(window) for ids in window]
    expected, loss = gradients(hf, provider, window, divisors)
    more = ["--load", str(hf), "--save", str(tmp_path / "ck"), "--clip-grad", "0"]
    argv = tiny_flags(tmp_path, *flags, *more, steps=1, batch=len(order), loss_cfg={"loss_type": mode})
    argv[argv.index("--micro-batch-size") + 1] = str(size)
    (record,) = launch_synthetic(nprocs, argv, tmp_path / "m.jsonl", provider)
    assert record["loss"] == pytest.approx(loss, rel=1e-5) and record["labelled_tokens"] == total
    agree(stepped(tmp_path / "ck", tmp_path / "one"), expected)


def test_the_two_means_differ_here(hf):
    """B09: with these samples the mean of means is another number than the mean over tokens, so that the test above can tell."""
    provider = ShortAndLong(order=(1, 2))
    by_token = gradients(hf, provider, [(1,), (2,)], [12, 12])[1]
    by_part = gradients(hf, provider, [(1,), (2,)], [6, 18])[1]
    assert by_token == pytest.approx(gradients(hf, provider, [(1, 2)], [12])[1], rel=1e-5)
    assert abs(by_token - by_part) > 1e-2


# --- B14 ------------------------------------------------------------------------------------------------------------


def test_samples_left_out_are_named(tmp_path):
    """B14: one micro-batch of four without labels: one warning with its sample, and a step that counts."""
    provider = Synthetic(order=(1, 2, 5, 4), unlabelled=frozenset({5}))
    said = printed(2, tiny_flags(tmp_path, *topology(pp=2), "--from-scratch", steps=1), provider)
    warning = "WARNING step 1: no labelled token in samples [5]; they are left out of the loss"
    assert sum(text.count(warning) for text in said) == 1
    assert "number of skipped iterations:   0 |" in said[-1]


# --- B53 ------------------------------------------------------------------------------------------------------------

KINDS = [(3, [(4, 4)], 40), (4, [(2, 4), (4, 2)], 32), (5, [], 28), (6, [(4, 6)], 36)]
"""Four samples of different lengths: (seed, images, tokens)."""


def padded(samples: list[dict], side: str) -> dict:
    """Samples as one micro-batch, padded on one side; positions by the product's own rule."""
    size = max(sample["input_ids"].shape[1] for sample in samples)
    made: dict[str, torch.Tensor] = {}
    for key, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        made[key] = torch.full((len(samples), size), fill)
        for row, sample in enumerate(samples):
            n = sample[key].shape[1]
            made[key][row, size - n if side == "left" else 0 :][:n] = sample[key][0]
    for key in ("image_grid_thw", "pixel_values"):
        if parts := [sample[key] for sample in samples if key in sample]:
            made[key] = torch.cat(parts)
    made["position_ids"] = mrope(
        made["input_ids"],
        made["attention_mask"],
        made.get("image_grid_thw"),
        image_token_id=IMAGE,
        spatial_merge_size=2,
    )
    return made


def loss_case(rank: int, side: str, size: int, degrees: dict) -> dict:
    """Losses and gradients of this rank against Hugging Face's `model(labels=...)`, which makes its own positions."""
    hf = tiny_glm_model(0)
    chunks, model, layout = assemble(hf, **degrees)
    samples = [batch(seed, images=[images], length=length) for seed, images, length in KINDS]
    for sample in samples:  # the first answer token is predicted from the last prompt token
        first = int((sample["labels"][0] != -100).nonzero()[0])
        assert sample["labels"][0, first] == sample["input_ids"][0, first] and sample["labels"][0, first - 1] == -100
    windows = [padded(samples[at : at + size], side) for at in range(0, len(samples), size)]
    expected = []
    for data in windows:
        inputs = {key: value for key, value in hf_inputs(data).items() if key != "position_ids"}
        loss = hf(**inputs, labels=data["labels"]).loss
        (loss * int((data["labels"][:, 1:] != -100).sum())).backward()
        expected.append(loss.item())
    chunks = wrap(chunks)
    got = train_step(chunks, windows, layout)
    counts = [int((data["labels"][:, 1:] != -100).sum()) for data in windows]
    return {
        "got": [loss.item() / count for loss, count in zip(got, counts)],
        "expected": expected,
        "worst": max(relative_gradients(hf, [chunk.module for chunk in chunks], model, layout, rank).values()),
    }


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("nprocs", "size", "degrees"),
    [(1, 1, {}), (1, 2, {}), (2, 2, {"tp": 2, "sequence_parallel": True}), (2, 2, {"pp": 2}), (1, 4, {})],
    ids=["bs1", "bs2", "bs2·tp2", "bs2·pp2", "bs4"],
)
def test_the_first_loss_is_hugging_faces(nprocs, size, degrees, side):
    """B53: `model(labels=...).loss` of four samples, padded left and right; labels are shifted once, positions are Hugging Face's."""
    results = run(loss_case, nprocs, side, size, degrees, timeout=60)
    assert any(result["got"] for result in results)
    for result in results:
        for got, want in zip(result["got"], result["expected"]):
            assert got == pytest.approx(want, rel=1e-5)
        assert result["worst"] <= 1e-4
