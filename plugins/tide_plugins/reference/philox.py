"""Philox4x32-10, the counter-based random numbers of Salmon et al. 2011, in Python integers."""

from __future__ import annotations

from collections.abc import Sequence

_MASK = 0xFFFFFFFF


def philox_4x32_10(counter: Sequence[int], key: int) -> tuple[int, int, int, int]:
    """Four 32-bit random words from a counter of four words and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform_at(seed: int, position: int, purpose: int) -> float:
    """A 24-bit number in [0, 1) for the token at ``position``: purpose 0 accepts a draft, 1 samples a token."""
    return (philox_4x32_10((position & _MASK, position >> 32, purpose, 0), seed)[0] >> 8) * 2.0**-24
