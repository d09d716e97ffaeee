"""GGUF's block formats as `QuantizedWeight`, bit by bit: nothing is quantised again.

Layouts: ggml/src/ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp. Formats with a minimum (Q4_1, Q5_1,
Q4_K, Q5_K) have a float offset, as their minimum is no multiple of the scale; the zero point takes its integer part, so that the
offset is at most half a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tide_export.weights.quantized_weight import QuantizedWeight

Bytes = NDArray[np.uint8]


def mapped(data: Bytes, kind: str) -> QuantizedWeight | None:
    """The tensor as a `QuantizedWeight`; None for a format without one.

    Args:
        data: [N, bytes of a row], as `GgufTensor` has it.
        kind: name of GGUF's quantisation type, such as Q4_K.
    """
    return _FORMATS[kind](data) if kind in _FORMATS else None


def _blocks(data: Bytes, size: int) -> Bytes:
    return data.reshape(data.shape[0], -1, size)


def _half(part: Bytes) -> NDArray[np.float32]:
    """[…, 2] bytes → […] fp32."""
    return np.ascontiguousarray(part).view(np.float16)[..., 0].astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """[…, n] bytes → […, 2n]: first all low, then all high halves."""
    return np.concatenate([packed & 0xF, packed >> 4], -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[…, 4] bytes → […, 32], the bits from the lowest on, each worth 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") * np.uint8(16)


def _symmetric(kind: str, bits: int, values: Bytes, scales: NDArray[np.float32]) -> QuantizedWeight:
    rows = len(values)
    return QuantizedWeight(bits, values.reshape(rows, -1), scales.reshape(rows, -1), origin=kind)


def _with_minimum(
    kind: str, bits: int, values: Bytes, scales: NDArray[np.float32], minima: NDArray[np.float32]
) -> QuantizedWeight:
    rows = len(values)
    scales = scales.reshape(rows, -1)
    minima = minima.reshape(rows, -1)
    steps = np.divide(-minima, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.clip(np.rint(steps), 0, (1 << bits) - 1).astype(np.uint8)
    offsets = minima + scales * zeros
    return QuantizedWeight(bits, values.reshape(rows, -1), scales, zeros, offsets, origin=kind)


def _q4_0(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 18)
    return _symmetric("Q4_0", 4, _halves(blocks[..., 2:]), _half(blocks[..., :2]))


def _q4_1(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 20)
    return _with_minimum("Q4_1", 4, _halves(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 22)
    values = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _symmetric("Q5_0", 8, values + 112, _half(blocks[..., :2]))  # GGUF's zero point is 16, ours 128


def _q5_1(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 24)
    values = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _with_minimum("Q5_1", 8, values, _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 34)
    return _symmetric("Q8_0", 8, blocks[..., 2:] ^ 0x80, _half(blocks[..., :2]))  # int8 + 128


def _k_scales(packed: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[…, 12] bytes → scales and minima of 6 bits, each […, 8]."""
    low = packed[..., :4]
    high = packed[..., 4:8]
    last = packed[..., 8:]
    scales = np.concatenate([low & 63, (last & 0xF) | ((low >> 6) << 4)], -1)
    minima = np.concatenate([high & 63, (last >> 4) | ((high >> 6) << 4)], -1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_blocks(kind: str, bits: int, blocks: Bytes, values: Bytes) -> QuantizedWeight:
    """Super-blocks of 8 blocks of 32: the block's scale and minimum are multiples of the super-block's."""
    scales, minima = _k_scales(blocks[..., 4:16])
    return _with_minimum(
        kind, bits, values, _half(blocks[..., :2])[..., None] * scales, -_half(blocks[..., 2:4])[..., None] * minima
    )


def _q4_k(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 144)
    return _k_blocks("Q4_K", 4, blocks, _halves(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)))


def _q5_k(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 176)
    low = _halves(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")  # [N, blocks, 32, 8]
    return _k_blocks("Q5_K", 8, blocks, low | (bits.swapaxes(-1, -2) << 4))


def _q6_k(data: Bytes) -> QuantizedWeight:
    blocks = _blocks(data, 210)
    low = _halves(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))  # [N, blocks, half, 128]
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = low | (pairs.reshape(low.shape) << 4)
    scales = _half(blocks[..., 208:])[..., None] * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return _symmetric("Q6_K", 8, values + 96, scales)  # GGUF's zero point is 32, ours 128


_FORMATS: dict[str, Callable[[Bytes], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
