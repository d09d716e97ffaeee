"""Products with weights in 4 or 8 bits, and look-ups in an embedding of such: `MatMulNBits` and `GatherBlockQuantized`
(com.microsoft). By default a product dequantises its weight, of which no copy is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unpacked(values: Tensor, bits: int) -> Tensor:
    """Bytes [..., n] as numbers [..., n · 8 / bits], the low nibble first."""
    if bits == 8:
        return values
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def dequantised(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int) -> Tensor:
    """[..., K] of packed ``values`` [..., K · bits / 8]: scale · (value - zero) in the dtype of ``scales`` [..., K / block].

    ``zeros``: packed zero points, a byte's first nibble may be the last; None: the middle of the range.
    """
    blocks = scales.shape[-1]
    numbers = unpacked(values, bits).unflatten(-1, (blocks, block)).to(scales.dtype)
    middle = 1 << (bits - 1) if zeros is None else unpacked(zeros, bits)[..., :blocks].to(scales.dtype).unsqueeze(-1)
    return ((numbers - middle) * scales.unsqueeze(-1)).flatten(-2)


class LowBitProduct:
    """x [..., K] times the transposed weight [N, K]. ``kernels``: the module `fused_kernels`, for few rows, or None."""

    def __init__(self, attributes: Mapping[str, Any], kernels: Any = None) -> None:
        self.rows, self.bits, self.block = attributes["N"], attributes["bits"], attributes["block_size"]
        self._kernels = kernels

    def __call__(self, x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        points = None if zeros is None else zeros.view(self.rows, -1)
        weight = values.view(self.rows, -1), scales.view(self.rows, -1), points, self.bits, self.block
        if self._kernels is not None and x.numel() // x.shape[-1] <= self._kernels.MOST_LOW_BIT_ROWS:
            return self._kernels.low_bit_product(x, *weight)
        return F.linear(x, dequantised(*weight))


def look_up(attributes: Mapping[str, Any]) -> Any:
    bits, block = attributes["bits"], attributes["block_size"]

    def rows(table: Tensor, ids: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        return dequantised(table[ids], scales[ids], None if zeros is None else zeros[ids], bits, block)

    return rows
