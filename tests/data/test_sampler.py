"""The order of samples: a function of (seed, epoch), whatever DP, workers or hash seed (field cases B40, B63, B64)."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from mm_models.data.sampler import BaseRandomBatchSampler, SequentialBatchSampler
from mm_models.errors import UserError


def steps(count, *, dp=1, micro=1, global_batch=4, total=23, **options):
    """`count` global batches as lists of ids, put together from all ranks."""
    per_step = global_batch // (micro * dp)
    ranks = [
        itertools.islice(
            BaseRandomBatchSampler(
                total, micro_batch_size=micro, global_batch_size=global_batch, dp_rank=rank, dp_size=dp, **options
            ),
            count * per_step,
        )
        for rank in range(dp)
    ]
    flat = [index for micros in zip(*ranks, strict=True) for found in micros for index in found]
    return [flat[at : at + global_batch] for at in range(0, len(flat), global_batch)]


def test_an_epoch_holds_every_sample_once_but_the_tail():
    epochs = steps(10)
    for epoch in (epochs[:5], epochs[5:]):
        found = [index for batch in epoch for index in batch]
        assert len(found) == len(set(found)) == 20
    assert sorted(epochs[0]) != sorted(epochs[5])


def test_orders_differ_between_epochs_and_seeds():
    sampler = BaseRandomBatchSampler(12, micro_batch_size=1, global_batch_size=2, seed=1)
    other = BaseRandomBatchSampler(12, micro_batch_size=1, global_batch_size=2, seed=2)
    orders = [sampler.order(epoch) for epoch in range(3)] + [other.order(epoch) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 6
    assert all(sorted(order) == list(range(12)) for order in orders)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_steps_do_not_depend_on_dp_or_micro_batch(dp, micro):
    assert steps(12, dp=dp, micro=micro) == steps(12)


@pytest.mark.parametrize("stop", [3, 9])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_resume_continues_in_mid_epoch_and_with_another_dp(stop, dp):
    assert steps(12 - stop, dp=dp, consumed_samples=4 * stop) == steps(12, dp=2)[stop:]


def test_shuffle_off_is_file_order():
    assert steps(6, shuffle=False)[:5] == [list(range(at, at + 4)) for at in range(0, 20, 4)]
    assert steps(6, shuffle=False)[5] == [0, 1, 2, 3]


def test_length_is_micro_batches_per_epoch_and_rank():
    assert len(BaseRandomBatchSampler(23, micro_batch_size=2, global_batch_size=4, dp_size=2)) == 5
    assert len(SequentialBatchSampler(23, micro_batch_size=1, global_batch_size=4, shuffle=False)) == 20


def test_the_hash_seed_does_not_matter():
    code = (
        "from mm_models.data.sampler import BaseRandomBatchSampler as S;"
        "print(S(12, micro_batch_size=1, global_batch_size=2, seed=7).order(2))"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(orders) == 1


def weighted(parts, *, epochs=1, **options):
    sampler = BaseRandomBatchSampler(
        sum(size for size, _ in parts), micro_batch_size=1, global_batch_size=4, parts=parts, **options
    )
    return [sampler.order(epoch) for epoch in range(epochs)]


class TestWeights:
    def test_whole_copies_and_another_part_each_epoch(self):
        orders = weighted([(10, 2.5), (4, 1.0), (20, 0.3)], epochs=4)
        parts = set()
        for order in orders:
            counts = [order.count(index) for index in range(34)]
            assert sorted(counts[:10]) == [2] * 5 + [3] * 5 and counts[10:14] == [1] * 4
            assert sorted(counts[14:]) == [0] * 14 + [1] * 6
            parts.add(tuple(counts))
        assert len(parts) == 4

    def test_weights_of_one_change_nothing(self):
        assert weighted([(10, 1.0), (13, 1.0)], epochs=3) == weighted([(23, 1)], epochs=3)
        assert steps(12, parts=[(10, 1.0), (13, 1.0)]) == steps(12)

    def test_without_shuffle_the_files_come_one_after_the_other(self):
        (order,) = weighted([(3, 2.0), (4, 0.5)], shuffle=False)
        assert order[:6] == [0, 1, 2, 0, 1, 2] and order[6:] == sorted(order[6:]) and len(order) == 8

    @pytest.mark.parametrize("dp", [1, 2, 4])
    def test_steps_and_resume_do_not_depend_on_dp(self, dp):
        parts = [(7, 1.5), (16, 0.6)]
        assert steps(12, dp=dp, parts=parts) == steps(12, parts=parts)
        assert steps(5, dp=dp, parts=parts, consumed_samples=28) == steps(12, parts=parts)[7:]

    def test_seeds_differ(self):
        assert weighted([(9, 0.5), (9, 2.0)], seed=1) != weighted([(9, 0.5), (9, 2.0)], seed=2)

    def test_a_file_that_would_have_no_place(self):
        with pytest.raises(UserError, match=r"weight 0.04 of a file with 10 samples leaves it no place"):
            weighted([(10, 1.0), (10, 0.04)])

    def test_a_file_of_which_nothing_was_kept(self):
        assert sorted(weighted([(0, 2.0), (5, 2.0)])[0]) == sorted([*range(5)] * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"total": 3, "global_batch_size": 4},
            "3 samples are fewer than one global batch of 4: no step could run. Lower the global batch, or give more",
        ),
        (
            {"total": 9, "global_batch_size": 6, "micro_batch_size": 2, "dp_size": 2},
            "6 does not divide by micro-batch 2 x data parallel 2 = 4",
        ),
    ],
)
def test_sizes_that_cannot_work(options, message):
    options = {"micro_batch_size": 1} | options
    with pytest.raises(UserError, match=message):
        BaseRandomBatchSampler(options.pop("total"), **options)
