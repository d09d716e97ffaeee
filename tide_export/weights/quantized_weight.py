"""The one form of a low-bit weight, whatever file or quantizer it came from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.manifest import INTEGER_PRODUCTS

INTEGER = "w8a8"  # name of the option --weights for integer products
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in blocks along its input dimension.

    ``w[n, k] = scales[n, b] * (values[n, k] - zero_points[n, b]) + offsets[n, b]`` with ``b = k // block_size``, divided by
    ``smoothing[k]`` where there is one.

    Args:
        bits: 4 or 8.
        values: uint8 [N, K], unsigned integers of ``bits`` bits, one per byte.
        scales: fp32 [N, K / block_size].
        zero_points: uint8 [N, K / block_size]; None: ``2 ** (bits - 1)`` everywhere.
        offsets: fp32 [N, K / block_size], for formats whose minimum is no multiple of the scale (GGUF's Q4_1, Q4_K); None: 0.
        origin: format or quantizer that it comes from, for the export's summary.
        smoothing: fp32 [K], of a product of integers (see `tide_export.quantize.smoothing`): its input is divided by these
            and rounded to 8 bits row by row. A block is then a row of the matrix, which was multiplied by them. None: the
            product takes its input as it is.

    Raises ValueError for shapes that do not fit together.
    """

    bits: int
    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None = None
    offsets: NDArray[np.float32] | None = None
    origin: str = ""
    smoothing: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        blocks = self.scales.shape[1] if self.scales.ndim == 2 else 0
        if self.bits not in (4, 8) or not blocks or columns % blocks:
            raise ValueError(f"{self.bits} bits, values {self.values.shape}, scales {self.scales.shape}: no whole blocks")
        for name in ("scales", "zero_points", "offsets"):
            part = getattr(self, name)
            if part is not None and part.shape != (rows, blocks):
                raise ValueError(f"{name} has shape {part.shape}, expected {(rows, blocks)}")
        if self.smoothing is not None and (blocks != 1 or self.smoothing.shape != (columns,)):
            raise ValueError(f"smoothing has shape {self.smoothing.shape}, expected {(columns,)}, and one block a row")

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features [N, K]."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def block_size(self) -> int:
        """Input features that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def has_zero_points(self) -> bool:
        return self.zero_points is not None

    @property
    def has_offsets(self) -> bool:
        return self.offsets is not None

    def materialize(self) -> QuantizedWeight:
        """Itself; see `DeferredWeight`."""
        return self

    def dequantized(self) -> NDArray[np.float32]:
        """The matrix [N, K] in fp32."""
        rows, blocks = self.scales.shape
        values = self.values.reshape(rows, blocks, -1).astype(np.float32)
        zero = np.float32(1 << (self.bits - 1)) if self.zero_points is None else self.zero_points[..., None].astype(np.float32)
        matrix = (values - zero) * self.scales[..., None]
        if self.offsets is not None:
            matrix += self.offsets[..., None]
        matrix = matrix.reshape(self.shape)
        return matrix if self.smoothing is None else np.divide(matrix, self.smoothing, out=matrix)

    def packed_values(self) -> NDArray[np.uint8]:
        """``values`` as ONNX Runtime's MatMulNBits takes them: uint8 [N, K / block_size, block_size · bits / 8], of two 4-bit
        values in a byte the first one in the low half."""
        rows, blocks = self.scales.shape
        return pack_nibbles(self.values, self.bits).reshape(rows, blocks, -1)

    def packed_zero_points(self) -> NDArray[np.uint8] | None:
        """``zero_points`` as MatMulNBits takes them: uint8 [N, ⌈K / block_size · bits / 8⌉]."""
        return None if self.zero_points is None else pack_nibbles(self.zero_points, self.bits)

    def rows(self, order: NDArray[np.integer]) -> QuantizedWeight:
        """The output features in another ``order``."""
        parts = {name: getattr(self, name) for name in ("values", "scales", "zero_points", "offsets")}
        return replace(self, **{name: part[order] for name, part in parts.items() if part is not None})

    def blocks(self, order: NDArray[np.integer]) -> QuantizedWeight:
        """The blocks of input features with these numbers, in this ``order``."""
        parts = {name: getattr(self, name) for name in ("scales", "zero_points", "offsets")}
        kept = {name: np.ascontiguousarray(part[:, order]) for name, part in parts.items() if part is not None}
        values = self.values.reshape(len(self.values), -1, self.block_size)[:, order]
        return replace(self, values=values.reshape(len(values), -1), **kept)


def block_order(columns: NDArray[np.integer], block_size: int) -> NDArray[np.integer] | None:
    """The order of the blocks that puts input features into the order ``columns``; None where blocks would be torn."""
    if len(columns) % block_size:
        return None
    found = columns.reshape(-1, block_size)
    whole = np.array_equal(found, found[:, :1] + np.arange(block_size)) and not (found[:, 0] % block_size).any()
    return found[:, 0] // block_size if whole else None


def pack_nibbles(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[N, M] values of 4 bits, two in a byte: [N, ⌈M / 2⌉]; 8-bit values as they are."""
    if bits == 8:
        return values
    padded = np.pad(values, ((0, 0), (0, 1))) if values.shape[1] % 2 else values  # np.pad copies
    return np.asarray(padded[:, ::2] | (padded[:, 1::2] << 4), np.uint8)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, M] bytes of two 4-bit values, the first one in the low half: [N, 2 · M]."""
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(len(packed), -1)


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The matrices joined along their output features, as one product computes them; None where their forms differ."""
    first = weights[0]
    if any((w.bits, w.block_size, w.shape[1]) != (first.bits, first.block_size, first.shape[1]) for w in weights):
        return None
    absent = {"zero_points": np.uint8(1 << (first.bits - 1)), "offsets": np.float32(0)}  # what None stands for
    joined: dict[str, NDArray[Any]] = {}
    for name in ("values", "scales", *absent):
        parts = [getattr(weight, name) for weight in weights]
        if any(part is not None for part in parts):
            filled = [np.full(w.scales.shape, absent[name]) if p is None else p for w, p in zip(weights, parts, strict=True)]
            joined[name] = np.concatenate(filled)
    return replace(first, **joined)


def by_rows(rows: int, work: Callable[[slice], None]) -> None:
    """Call ``work`` with slices of all ``rows``, in all threads: numpy lets others run."""
    parts = [slice(first, first + _ROWS_AT_A_TIME) for first in range(0, rows, _ROWS_AT_A_TIME)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(work, parts))


def integer_rows(matrix: NDArray[np.float32], smoothing: NDArray[np.float32]) -> QuantizedWeight:
    """``matrix`` [N, K] times ``smoothing`` [K], each row rounded to 8 bits with the scale of its largest value."""
    values, scales = np.empty(matrix.shape, np.uint8), np.empty((len(matrix), 1), np.float32)

    def round_rows(part: slice) -> None:
        numbers = matrix[part] * smoothing
        largest = np.maximum(numbers.max(-1, keepdims=True), -numbers.min(-1, keepdims=True))
        scales[part] = np.maximum(largest, 1e-12) / 127
        numbers /= scales[part]
        np.rint(numbers, out=numbers)
        numbers += 128
        values[part] = numbers

    by_rows(len(matrix), round_rows)
    return QuantizedWeight(8, values, scales, origin=INTEGER_PRODUCTS, smoothing=smoothing)


def symmetric_int8(matrix: NDArray[np.float32], block_size: int) -> QuantizedWeight:
    """``matrix`` [N, K] rounded to the nearest of 8 bits, each block with the scale of its largest value."""
    blocks = matrix.reshape(len(matrix), -1, block_size)
    scales = np.maximum(np.abs(blocks).max(-1), 1e-12) / 127
    values = (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8)
    return QuantizedWeight(8, values.reshape(matrix.shape), scales.astype(np.float32))


def symmetric_int4(matrix: NDArray[np.float32], block_size: int) -> QuantizedWeight:
    """``matrix`` [N, K] rounded to the nearest of 4 bits as GGUF's Q4_0 does: the largest of a block, whatever its sign, is -8
    times the scale."""
    blocks = matrix.reshape(len(matrix), -1, block_size)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(-8)).astype(np.float32)
    values = (np.clip(np.rint(blocks / scales), -8, 7) + 8).astype(np.uint8)
    return QuantizedWeight(4, values.reshape(matrix.shape), scales[..., 0], origin="int4 symmetric")
