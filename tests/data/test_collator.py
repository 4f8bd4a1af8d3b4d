"""Micro-batches: the tensors of Hugging Face's processor, padded; only what is needed is built."""

from __future__ import annotations

import pytest
import torch

from mm_models.components.loss import IGNORE
from mm_models.data.collator import NEEDS, VisionLanguageCollator
from mm_models.data.dataset import ChatDataset
from mm_models.data.positions import mrope
from mm_models.errors import UserError
from tests.data import kit


@pytest.fixture(scope="module")
def dataset(folder, processor, template, tmp_path_factory):
    base = tmp_path_factory.mktemp("data")
    for seed, size in enumerate([(112, 112), (150, 90), (40, 200)]):
        kit.picture(base / f"{seed}.png", *size, seed=seed)
    rows = [
        kit.row("no picture", "a long enough answer to pad the others"),
        kit.row("<image>one", "a"),
        kit.row("<image>two<image>", "b", "more", "c", images=["1.png", "2.png"]),
    ]
    rows[1]["images"] = ["0.png"]
    return ChatDataset(kit.data_config(folder, base, rows), processor, template)


@pytest.fixture(scope="module")
def collate(processor):
    def build(**options):
        return VisionLanguageCollator(**{"processor": processor, "positions": mrope} | options)

    return build


def test_one_sample_is_the_processors_own(dataset, collate, processor):
    batch = collate()([dataset[2]])
    turns = kit.turns("<image>two<image>", "b", "more", "c")
    images = [kit.pattern(150, 90, 1), kit.pattern(40, 200, 2)]
    expected = processor.apply_chat_template(
        kit.messages(turns, images), tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert torch.equal(batch["input_ids"][:, :-1], expected["input_ids"])
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert torch.equal(batch["image_grid_thw"], expected["image_grid_thw"])
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["attention_mask"].all()


def test_a_batch_is_its_samples_padded(dataset, collate):
    alone = [collate()([sample]) for sample in dataset]
    batch = collate(pad_to_multiple_of=8)(list(dataset))
    assert batch["sample_ids"] == [0, 1, 2]
    longest = max(len(sample.ids) for sample in dataset)
    assert batch["input_ids"].shape == (3, -(-longest // 8) * 8)
    for row, single in enumerate(alone):
        length = single["input_ids"].shape[1]
        for name in ("input_ids", "labels", "attention_mask"):
            assert torch.equal(batch[name][row, :length], single[name][0])
        assert torch.equal(batch["position_ids"][:, row, :length], single["position_ids"][:, 0])
        assert (batch["labels"][row, length:] == IGNORE).all()
        assert (batch["attention_mask"][row, length:] == 0).all()
        assert (batch["position_ids"][:, row, length:] == 0).all()
    assert torch.equal(batch["pixel_values"], torch.cat([alone[1]["pixel_values"], alone[2]["pixel_values"]]))
    assert batch["image_grid_thw"].prod(1).sum() == batch["pixel_values"].shape[0]


def test_labels_are_not_shifted_and_hold_only_trained_ids(dataset, collate):
    batch = collate()(list(dataset))
    trained = batch["labels"] != IGNORE
    assert torch.equal(batch["labels"][trained], batch["input_ids"][trained])
    assert trained.sum(1).tolist() == [sample.labelled for sample in dataset]


@pytest.mark.parametrize(
    ("needs", "keys"),
    [
        (set(), set()),
        ({"ids"}, {"input_ids", "attention_mask"}),
        ({"positions"}, {"position_ids"}),
        ({"labels"}, {"labels"}),
        ({"grid"}, {"image_grid_thw"}),
        ({"pixels"}, {"pixel_values"}),
        (NEEDS, {"input_ids", "attention_mask", "position_ids", "labels", "image_grid_thw", "pixel_values"}),
    ],
)
def test_only_what_is_needed(dataset, collate, needs, keys):
    full = collate()(list(dataset))
    batch = collate(needs=frozenset(needs))(list(dataset))
    assert batch.keys() == {"sample_ids"} | keys
    assert all(torch.equal(batch[key], full[key]) for key in keys)


def test_text_alone_brings_no_image_tensors(dataset, collate):
    assert collate()([dataset[0]]).keys() == {"sample_ids", "input_ids", "attention_mask", "position_ids", "labels"}


def test_an_image_that_changed_since_the_start(folder, processor, template, tmp_path, collate):
    path = kit.picture(tmp_path / "x.png", 112, 112)
    config = kit.data_config(folder, tmp_path, [kit.row("<image>", "a", images=["x.png"])])
    sample = ChatDataset(config, processor, template)[0]
    kit.picture(path, 112, 56)
    with pytest.raises(UserError, match=r"row 0, image .*x.png.*the file has changed"):
        collate()([sample])


def test_needs_that_do_not_exist(collate):
    with pytest.raises(UserError, match="needs \\['pixel'\\]: unknown"):
        collate(needs=frozenset({"pixel"}))
    with pytest.raises(UserError, match="no text decoder"):
        collate(positions=None)
