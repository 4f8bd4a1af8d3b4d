"""The token dump: what is kept and when it is written; and that a comparison sees every kind of difference, and no other."""

from __future__ import annotations

import pytest
import torch

from mm_models.errors import UserError
from mm_models.train.session import Position
from mm_models.train.token_dump import Dump, difference
from mm_models.train.tokens import Place, TokenDump, check_folder, recording

GRID = [(1, 2, 4), (1, 4, 2)]


def sample(id: int, length: int | None = None) -> dict[str, torch.Tensor]:
    """A sample as the collator would make it alone: 6 + id tokens, padded to `length`; the values are its own."""
    size, length = 6 + id, length or 6 + id
    ids, labels, mask = torch.full((length,), 99), torch.full((length,), -100), torch.zeros(length, dtype=torch.int64)
    ids[:size], mask[:size] = torch.arange(size) + 100 * id, 1
    labels[3:size] = ids[3:size]
    positions = torch.stack([torch.arange(length) * k + id for k in (1, 2, 3)]) * mask
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}


def micro(*ids: int) -> dict:
    """A micro-batch; odd samples have an image."""
    rows = [sample(id, max(6 + id for id in ids)) for id in ids]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch |= {"position_ids": batch["position_ids"].transpose(0, 1), "sample_ids": list(ids)}
    if odd := [id for id in ids if id % 2]:
        batch["image_grid_thw"] = torch.tensor([GRID[id // 2 % 2] for id in odd])
        batch["pixel_values"] = torch.cat([torch.arange(24.0).reshape(8, 3) + id for id in odd])
    return batch


def write(folder, *steps, place=None, keep=None) -> Dump | None:
    """A dump of one file; a step is a list of micro-batches."""
    dump = TokenDump(folder, place or Place(), tokenizer="none")
    for number, step in enumerate(steps, start=1):
        for batch in step:
            dump.add(
                number, {name: batch[name] for name in batch if keep is None or name in keep or name == "sample_ids"}
            )
    dump.write()
    return Dump(folder) if place is None else None


STEPS = ([micro(0), micro(1), micro(2), micro(3)], [micro(5), micro(4), micro(7), micro(6)])


@pytest.fixture
def whole(tmp_path):
    return write(tmp_path / "whole", *STEPS)


class Receiver(torch.nn.Module):
    def forward(self, data):
        return data


def record(folder, steps, *, batches=2, start=1, fail_at=None, writes=True):
    """Run a module over `steps` micro-batches a step; the folder's files after each step."""
    module, position, seen = Receiver(), Position(), []
    place = Place()
    with recording(module, position, folder=folder, batches=batches, place=place, tokenizer="none", writes=writes):
        for number, step in enumerate(steps, start=start):
            position.step = number
            for batch in step:
                module(batch)
            if number == fail_at:
                raise RuntimeError("non-finite")
            seen.append(sorted(path.name for path in folder.glob("*")) if folder else [])
    assert not module._forward_pre_hooks
    return seen


class TestRecording:
    def test_the_first_steps_are_kept_and_written_when_the_next_begins(self, tmp_path, whole):
        seen = record(tmp_path / "d", [*STEPS, STEPS[0]])
        assert seen == [[], [], ["dp0.pp0.json", "dp0.pp0.safetensors"]]
        assert difference(Dump(tmp_path / "d"), whole) is None

    def test_a_short_run_writes_what_it_has(self, tmp_path):
        record(tmp_path / "d", STEPS[:1], batches=8)
        assert Dump(tmp_path / "d").steps == [1]

    def test_a_resumed_run_starts_at_its_own_step(self, tmp_path):
        record(tmp_path / "d", [*STEPS, STEPS[0]], start=101)
        assert Dump(tmp_path / "d").steps == [101, 102]

    def test_a_run_that_fails_writes_what_it_has(self, tmp_path):
        with pytest.raises(RuntimeError, match="non-finite"):
            record(tmp_path / "d", STEPS, batches=8, fail_at=2)
        assert Dump(tmp_path / "d").steps == [1, 2]

    def test_nothing_without_a_folder_or_on_a_rank_that_does_not_write(self, tmp_path):
        record(None, STEPS)
        record(tmp_path / "d", STEPS, writes=False)
        assert not (tmp_path / "d").exists()

    def test_the_loss_mask_is_the_labels_that_enter_the_loss(self, tmp_path):
        batch = micro(2)
        batch["labels"][:, 0] = 7  # predicted by no token
        (row,) = write(tmp_path / "d", [batch]).batch(1).rows
        assert row.parts["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]

    def test_on_top_of_another_dump_nothing_is_written(self, tmp_path, whole):
        check_folder(str(tmp_path / "new"))
        with pytest.raises(UserError, match="holds a token dump already"):
            check_folder(str(whole.folder))


class TestShares:
    """What several ranks wrote is one dump."""

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_data_parallel_ranks(self, tmp_path, whole, ranks):
        for rank in range(ranks):
            place = Place(dp_rank=rank, dp_size=ranks)
            write(tmp_path / "d", *(step[rank::ranks] for step in STEPS), place=place)
        assert difference(whole, Dump(tmp_path / "d")) is None

    def test_stages_that_lack_parts(self, tmp_path, whole):
        needs = ({"image_grid_thw", "pixel_values"}, {"input_ids", "attention_mask", "image_grid_thw"}, set())
        for stage, keep in enumerate((*needs, {"labels", "position_ids"})):
            write(tmp_path / "d", *STEPS, place=Place(stage=stage, stages=4), keep=keep)
        assert difference(whole, Dump(tmp_path / "d")) is None

    def test_stages_that_were_given_different_data(self, tmp_path):
        write(tmp_path / "d", [micro(1)], place=Place(stage=0, stages=2))
        other = micro(1)
        other["position_ids"][0, 0, 3] += 1
        write(tmp_path / "d", [other], place=Place(stage=1, stages=2))
        with pytest.raises(UserError, match="stage 1 was given other position_ids"):
            Dump(tmp_path / "d").batch(1)

    def test_a_rank_that_is_missing(self, tmp_path):
        write(tmp_path / "d", [micro(1)], place=Place(dp_rank=0, dp_size=3))
        with pytest.raises(UserError, match=r"not complete, dp1\.pp0, dp2\.pp0 missing"):
            Dump(tmp_path / "d")
        with pytest.raises(UserError, match="no token dump there"):
            Dump(tmp_path)


def changed(name: str, *place: int, by: float = 1):
    """STEPS with one value of the second step's first micro-batch (sample 5, with an image) changed."""
    batch = micro(5)
    batch[name] = batch[name].clone()
    batch[name][place] += by
    return [STEPS[0], [batch, *STEPS[1][1:]]]


@pytest.mark.parametrize(
    ("steps", "part", "words"),
    [
        (changed("input_ids", 0, 7), "input_ids", r"sample 5, input_ids\[7\]: 507 and 508"),
        (changed("labels", 0, 4), "labels", r"labels\[4\]: 504 and 505"),
        (changed("attention_mask", 0, 2, by=-1), "attention_mask", r"attention_mask\[2\]: 1 and 0"),
        (changed("position_ids", 1, 0, 2), "position_ids", r"position_ids\[2\]: \[7, 9, 11\] and \[7, 10, 11\]"),
        (changed("pixel_values", 3, 1, by=2e-6), "images", "image 0 of the batch has other pixels"),
        ([STEPS[0], [STEPS[1][1], STEPS[1][0], *STEPS[1][2:]]], "sample_ids", "place 0 of the batch: sample 5 and sample 4"),
        ([STEPS[0]], "steps", "1 steps from 2 on are not in both"),
        ([STEPS[0], STEPS[1][:3]], "sample_ids", "a global batch of 4 and of 3 samples"),
    ],
    ids=["ids", "labels", "mask", "positions", "pixels", "order", "steps", "size"],
)  # fmt: skip
def test_every_difference_is_seen(tmp_path, whole, steps, part, words):
    other = write(tmp_path / "d", *steps)
    for a, b in ((whole, other), (other, whole)):
        found = difference(a, b)
        assert (found.step, found.part) == (2, part)
    assert difference(whole, other, batches=1) is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(difference(whole, other).what)


def test_a_grid_that_differs_is_seen(tmp_path, whole):
    batch = micro(5)
    batch["image_grid_thw"] = torch.tensor([[1, 4, 2]])
    found = difference(whole, write(tmp_path / "d", STEPS[0], [batch, *STEPS[1][1:]]))
    assert found.what == "image 0 of the batch has grid (1, 2, 4) and (1, 4, 2)"


def test_padding_is_no_difference_but_what_stands_in_it_is(tmp_path, whole):
    """Larger micro-batches pad more; a label in the surplus would enter the loss."""
    pairs = [[micro(*(id for m in step[at : at + 2] for id in m["sample_ids"])) for at in (0, 2)] for step in STEPS]
    assert difference(whole, write(tmp_path / "d", *pairs)) is None
    pairs[1][0]["labels"][1, 10] = 99  # sample 4 has 10 tokens, padded to sample 5's 11
    found = difference(whole, write(tmp_path / "e", *pairs))
    assert (found.step, found.part, found.at) == (2, "input_ids", 10) and "token 10 is no padding" in found.what


def test_what_an_evaluation_hands_the_model_is_left_out(tmp_path):
    module, position = torch.nn.Identity(), Position(step=1)
    with recording(module, position, folder=str(tmp_path), batches=2, place=Place(), tokenizer="none"):
        module(micro(0, 1))
        module.eval()(micro(2))
        module.train()
    (step,) = Dump(tmp_path).steps
    assert len(Dump(tmp_path).batch(step).rows) == 2
