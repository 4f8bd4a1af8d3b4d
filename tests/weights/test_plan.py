"""Plans between arbitrary shardings: exact where the two sides fit, refused where they do not."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_models.errors import UserError
from mm_models.weights.boxes import Placement, volume
from mm_models.weights.engine import execute
from mm_models.weights.plan import Fragment, plan

SHAPE = (4, 6, 10)


def cuts(draw, size: int) -> list[tuple[int, int]]:
    """A partition of [0, size) into intervals."""
    inner = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
    edges = [0, *inner, size]
    return list(itertools.pairwise(edges))


@st.composite
def shardings(draw, shape=SHAPE):
    """The whole of `shape` in grid cells, dealt to up to three fragments that stack their cells along dimension 0 where
    they can, else hold one cell each."""
    grid = [cuts(draw, n) for n in shape]
    return [((a, b, c), (a2 - a, b2 - b, c2 - c)) for a, a2 in grid[0] for b, b2 in grid[1] for c, c2 in grid[2]]


def fragments(cells, data: np.ndarray | None, dtype="I32", tensor="t"):
    """One fragment per cell, in memory, filled from `data` or empty."""
    found = []
    for number, (start, extent) in enumerate(cells):
        values = (
            np.full(extent, -1, np.int32)
            if data is None
            else data[tuple(slice(s, s + n) for s, n in zip(start, extent))].copy()
        )
        memory = memoryview(values.reshape(-1).view(np.uint8))
        placement = Placement(tensor, start, (0,) * len(extent), extent)
        found.append(
            (
                Fragment(
                    label=f"{tensor}[{number}]", dtype=dtype, shape=extent, placements=(placement,), memory=memory
                ),
                values,
            )
        )
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sharding_becomes_any_other(data):
    whole = np.arange(volume(SHAPE), dtype=np.int32).reshape(SHAPE)
    sources = fragments(data.draw(shardings()), whole)
    cells = data.draw(shardings())
    targets = fragments(cells, None)
    block = data.draw(st.sampled_from([40, 200, 1 << 20]))
    planned = plan([f for f, _ in sources], [f for f, _ in targets], {"t": SHAPE}, block=block)
    result = execute(planned, jobs=data.draw(st.sampled_from([1, 3])))
    for (start, extent), (_, values) in zip(cells, targets, strict=True):
        assert np.array_equal(values, whole[tuple(slice(s, s + n) for s, n in zip(start, extent))])
    assert result.bytes_read == result.bytes_written == whole.nbytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_missing_source_and_a_doubled_one_are_found(data):
    whole = np.arange(volume(SHAPE), dtype=np.int32).reshape(SHAPE)
    cells, targets = data.draw(shardings()), [f for f, _ in fragments(data.draw(shardings()), None)]
    sources = [f for f, _ in fragments(cells, whole)]
    victim = data.draw(st.integers(0, len(sources) - 1))
    with pytest.raises(UserError, match=r"have no source|no source holds|elements would be written"):
        plan([f for i, f in enumerate(sources) if i != victim], targets, {"t": SHAPE})
    start, extent = cells[victim]
    if volume(extent) > 1:  # a cell that overlaps, without being a copy
        dim = max(range(3), key=lambda d: extent[d])
        smaller = tuple(n - 1 if d == dim else n for d, n in enumerate(extent))
        ((extra, _),) = fragments([(start, smaller)], whole)
        with pytest.raises(UserError, match="are in both"):
            plan([*sources, extra], targets, {"t": SHAPE})


def test_a_source_that_goes_nowhere_is_found():
    whole = np.zeros(SHAPE, np.int32)
    half = [((0, 0, 0), (2, 6, 10))]
    source, target = fragments([((0, 0, 0), SHAPE)], whole), fragments(half, None)
    with pytest.raises(UserError, match=r"t\[0\]: 120 of 240 elements go nowhere"):
        plan([source[0][0]], [target[0][0]], {"t": SHAPE})
    plan([source[0][0]], [target[0][0]], {"t": SHAPE}, use_all=False)


def test_copies_are_read_once_and_reported():
    whole = np.arange(volume(SHAPE), dtype=np.int32).reshape(SHAPE)
    cells = [((0, 0, 0), SHAPE)]
    sources = [fragments(cells, whole)[0][0] for _ in range(3)]
    targets = [fragments(cells, None)[0] for _ in range(2)]
    planned = plan(sources, [f for f, _ in targets], {"t": SHAPE})
    assert (
        planned.bytes_read == whole.nbytes and planned.bytes_written == 2 * whole.nbytes and len(planned.replicas) == 2
    )
    execute(planned)
    assert all(np.array_equal(values, whole) for _, values in targets)


def test_data_types_must_agree():
    whole = np.zeros((4, 3), np.int32)
    cells = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    one, two = fragments(cells, whole)
    target = fragments([((0, 0), (4, 3))], None, dtype="F32")[0][0]
    with pytest.raises(UserError, match=r"t\[0\] is F32, its source t\[0\] is I32; a converter never casts"):
        plan([one[0], two[0]], [target], {"t": (4, 3)})
    other = fragments(cells, whole, dtype="F32")[1][0]
    with pytest.raises(UserError, match=r"different data types \(I32 in t\[0\] but F32 in t\[1\]\)"):
        plan([one[0], other], [target], {"t": (4, 3)})


def turned(fragments):
    """The same fragments over bytes whose last two dimensions are swapped."""
    found = []
    for fragment, values in fragments:
        stored = np.ascontiguousarray(values.swapaxes(-1, -2))
        memory = memoryview(stored.reshape(-1).view(np.uint8))
        found.append((replace(fragment, memory=memory, transposed=True), stored.swapaxes(-1, -2)))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sharding_becomes_any_other_in_the_other_byte_order(data):
    whole = np.arange(volume(SHAPE), dtype=np.int32).reshape(SHAPE)
    sources = fragments(data.draw(shardings()), whole)
    targets = fragments(data.draw(shardings()), None)
    sources = turned(sources) if data.draw(st.booleans()) else sources
    targets = turned(targets) if data.draw(st.booleans()) else targets
    planned = plan([f for f, _ in sources], [f for f, _ in targets], {"t": SHAPE}, block=data.draw(st.integers(1, 64)))
    result = execute(planned, jobs=1)
    assert result.bytes_read == result.bytes_written == planned.bytes_read == planned.bytes_written == whole.nbytes
    for number, (fragment, values) in enumerate(targets):
        placement = fragment.placements[0]
        assert np.array_equal(values, whole[tuple(slice(s, s + n) for s, n in zip(placement.start, placement.extent))])
        assert result.crcs[number] == zlib.crc32(fragment.memory)


def test_of_a_transposed_box_only_its_columns_are_read():
    whole = np.arange(volume(SHAPE), dtype=np.int32).reshape(SHAPE)
    sources = fragments([((0, 0, 0), SHAPE)], whole)
    for wrap in (turned, list):
        targets = wrap(fragments([((1, 0, 3), (2, 6, 4))], None))
        result = execute(plan([sources[0][0]], [targets[0][0]], {"t": SHAPE}, use_all=False), jobs=1)
        assert np.array_equal(targets[0][1], whole[1:3, :, 3:7]) and result.bytes_read == 2 * 6 * 4 * 4
