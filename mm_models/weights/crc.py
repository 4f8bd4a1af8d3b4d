"""CRC-32 of data that is seen in pieces and out of order: the CRC of a concatenation from the CRCs of its parts.

The same polynomial as `zlib.crc32` (zip, gzip). Appending n zero bytes multiplies the register by x^(8n) modulo the
polynomial; that factor is computed by repeated squaring and remembered per length.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache

POLYNOMIAL = 0xEDB88320  # reflected
ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial, both reflected."""
    product = 0
    while a:
        if a & ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _squarings(k: int) -> int:
    """x^(2^k) modulo the polynomial."""
    if k == 0:
        return 1 << 30
    half = _squarings(k - 1)
    return _multiply(half, half)


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8·nbytes) modulo the polynomial."""
    factor, k = ONE, 3
    while nbytes:
        if nbytes & 1:
            factor = _multiply(_squarings(k), factor)
        nbytes >>= 1
        k += 1
    return factor


def combine(first: int, second: int, second_length: int) -> int:
    """The CRC of first + second, from their CRCs and the length of the second in bytes."""
    return _multiply(_shift(second_length), first) ^ second if second_length else first


def combine_all(pieces: Iterable[tuple[int, int, int]], *, start: int, length: int) -> int | None:
    """The CRC of bytes `[start, start + length)` from (offset, length, crc) pieces in any order; None unless they tile it exactly."""
    crc, at = 0, start
    for offset, size, piece in sorted(pieces):
        if offset != at:
            return None
        crc = combine(crc, piece, size)
        at += size
    return crc if at == start + length else None
