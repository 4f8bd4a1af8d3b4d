"""CRC-32 of concatenations against zlib."""

from __future__ import annotations

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from mm_models.weights.crc import combine, combine_all


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_is_the_crc_of_the_concatenation(first, second):
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_combine_takes_lengths_beyond_four_gigabytes():
    """2^32 zero bytes twice are 2^33 zero bytes: no length wraps."""
    zero = zlib.crc32(b"\0" * 1024)
    size = 1024
    while size < 1 << 34:
        zero, size = combine(zero, zero, size), 2 * size
    assert combine(combine(0, zero, size), 0, 0) == zero
    assert zero != zlib.crc32(b"\0" * 1024)


@given(st.binary(min_size=1, max_size=400), st.integers(1, 9), st.randoms(use_true_random=False))
def test_pieces_in_any_order(data, size, shuffler: random.Random):
    pieces = [
        (100 + at, len(data[at : at + size]), zlib.crc32(data[at : at + size])) for at in range(0, len(data), size)
    ]
    shuffler.shuffle(pieces)
    assert combine_all(pieces, start=100, length=len(data)) == zlib.crc32(data)
    assert combine_all(pieces[1:], start=100, length=len(data)) is None
    assert combine_all(pieces, start=100, length=len(data) + 1) is None
