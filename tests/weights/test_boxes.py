"""The box algebra against brute force: every claim is checked element by element on small shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_models.weights.boxes import Placement, flat_range, intersect, partition_fault, row_runs, volume, whole

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    start = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(start), tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))


def mask(shape, box):
    found = np.zeros(shape, int)
    found[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))] = 1
    return found


@given(st.data())
def test_intersection_is_the_common_elements(data):
    shape = data.draw(shapes)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = intersect(a, b)
    expected = mask(shape, a) & mask(shape, b)
    assert np.array_equal(expected, mask(shape, common) if common else np.zeros(shape, int))


@given(st.data())
def test_partition_is_proven_exactly_when_every_element_is_covered_once(data):
    shape = data.draw(shapes)
    found = data.draw(st.lists(boxes(shape), max_size=4))
    covered = sum((mask(shape, box) for box in found), np.zeros(shape, int))
    assert (partition_fault(shape, found) is None) == bool((covered == 1).all())


@given(st.data())
def test_a_flat_range_is_its_boxes(data):
    shape = data.draw(shapes)
    start = data.draw(st.integers(0, volume(shape)))
    stop = data.draw(st.integers(start, volume(shape)))
    found = list(flat_range(shape, start, stop))
    covered = sum((mask(shape, box) for box in found), np.zeros(shape, int)).ravel()
    expected = np.zeros(volume(shape), int)
    expected[start:stop] = 1
    assert np.array_equal(covered, expected)
    assert len(found) <= 2 * len(shape)


@settings(max_examples=200)
@given(st.data())
def test_row_runs_address_every_row_of_a_placement(data):
    """Rows in a run are consecutive on both sides: what a plan reads and writes as one piece."""
    shape = data.draw(shapes)
    local_shape = tuple(n + data.draw(st.integers(0, 2)) for n in shape)
    start, extent = data.draw(boxes(shape))
    local = tuple(data.draw(st.integers(0, m - n)) for m, n in zip(local_shape, extent, strict=True))
    source = np.arange(volume(shape)).reshape(shape)
    got = np.full(local_shape, -1)
    flat_source, flat_got = source.reshape(-1, shape[-1]), got.reshape(-1, local_shape[-1])
    placement = Placement("t", start, local, extent)
    for row, local_row, rows in row_runs(shape[:-1], local_shape[:-1], placement):
        columns = slice(start[-1], start[-1] + extent[-1]), slice(local[-1], local[-1] + extent[-1])
        assert (flat_got[local_row : local_row + rows, columns[1]] == -1).all()
        flat_got[local_row : local_row + rows, columns[1]] = flat_source[row : row + rows, columns[0]]
    expected = np.full(local_shape, -1)
    cut = tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))
    expected[tuple(slice(s, s + n) for s, n in zip(local, extent, strict=True))] = source[cut]
    assert np.array_equal(got, expected)


def test_clipping_a_placement_keeps_elements_together():
    placement = Placement("t", (4, 0), (1, 2), (3, 5))
    clipped = placement.clip_local(((2, 0), (10, 4)))
    assert clipped == Placement("t", (5, 0), (2, 2), (2, 2))
    assert whole("t", (2, 3)).clip_local(((2, 0), (1, 1))) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([((0, 0), (2, 2))], "4 of 6"),
        ([((0, 0), (2, 2)), ((1, 1), (1, 2))], "overlap"),
        ([((0, 0), (2, 4))], "does not lie in"),
    ],
)
def test_a_partition_fault_says_what_is_wrong(found, words):
    assert words in partition_fault((2, 3), found)
