"""Random weights in GGUF's blocks. Scales give weights a standard deviation of about 0.04."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

GROUP = 32
_SUPER_BLOCK = 256


def _halves(scale: float, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """fp16 numbers around ``scale`` as bytes [*shape, 2]."""
    return (scale * rng.uniform(0.5, 1.5, (*shape, 1))).astype(np.float16).view(np.uint8)


def _q4_k(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """[N, bytes]: per super-block scale, minimum, 12 bytes of scales of 6 bits, 128 bytes of values."""
    shape = (rows, columns // _SUPER_BLOCK)
    blocks = [_halves(2e-4, shape, rng), _halves(1.5e-3, shape, rng), rng.integers(0, 256, (*shape, 140), np.uint8)]
    return np.concatenate(blocks, -1).reshape(rows, -1)


def _plain(scale: float, value_bytes: int) -> Callable[[int, int, np.random.Generator], NDArray[np.uint8]]:
    """A packer of formats with a scale before the ``value_bytes`` of each 32 values."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
        shape = (rows, columns // GROUP)
        values = np.frombuffer(rng.bytes(rows * columns // GROUP * value_bytes), np.uint8).reshape(*shape, value_bytes)
        return np.concatenate([_halves(scale, shape, rng), values], -1).reshape(rows, -1)

    return pack


# GGUF's type → makes a matrix of output and input features N, K.
BLOCKS: Mapping[str, Callable[[int, int, np.random.Generator], NDArray[np.uint8]]] = {
    "Q4_K": _q4_k, "Q4_0": _plain(8e-3, 16), "Q5_0": _plain(4e-3, 20), "Q8_0": _plain(5e-4, 32),
}  # fmt: skip
