from __future__ import annotations

import pickle

import pytest
import torch

from mm_models.data.parcel import SMALL, Parcel


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(0)
    return {
        "sample_ids": [3, 1],
        "input_ids": torch.randint(99, (2, 7), generator=draw),
        "attention_mask": torch.ones(2, SMALL // 16, dtype=torch.int64),  # just small
        "labels": torch.ones(2, SMALL // 16 + 1, dtype=torch.int64),  # just large
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64),
        "pixel_values": torch.rand(300, 1176, generator=draw),
    }


def test_a_batch_arrives_as_it_was(batch):
    found = pickle.loads(pickle.dumps(Parcel(batch))).open()
    assert list(found) == list(batch)
    for name, value in batch.items():
        if name == "sample_ids":
            assert found[name] == value
        else:
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    found["input_ids"] += 1  # the receiver may write


def test_what_is_small_is_no_tensor_on_the_way(batch):
    parts = Parcel(batch)._parts
    assert {name for name, value in parts.items() if isinstance(value, torch.Tensor)} == {"labels", "pixel_values"}


def test_every_tensor_is_pinned(batch, monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    found = Parcel(batch).pin_memory()
    assert list(found) == list(batch) and len(pinned) == 5
