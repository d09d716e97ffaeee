"""Products with weights in 4 or 8 bits, those of experts too, and look-ups in an embedding of such: `MatMulNBits`, `QMoE` and
`GatherBlockQuantized` (com.microsoft). By default a product dequantises its weight, of which no copy is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_DEQUANTISED = 1 << 25  # numbers of experts' matrices at once, but at least one matrix
_Experts = tuple[Tensor, Tensor, Tensor | None]  # values, scales and zero points, each [E, N, …]


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
        self.rows = attributes["N"]
        self.bits = attributes["bits"]
        self.block = attributes["block_size"]
        self._kernels = kernels

    def __call__(self, x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        points = None if zeros is None else zeros.view(self.rows, -1)
        weight = values.view(self.rows, -1), scales.view(self.rows, -1), points, self.bits, self.block
        if self._kernels is not None and self._kernels.takes(x.shape[-2], x.numel() // x.shape[-1]):
            return self._kernels.low_bit_product(x, *weight)
        return F.linear(x, dequantised(*weight))


class LowBitExperts:
    """The gated MLP of each row's one expert: down · (silu(gate) · up), where rows of gate and up alternate.

    Rows are put into blocks, each of one expert, and a block is multiplied with its expert's matrices. There are as many blocks
    as any choice of experts may need, so that shapes follow from the number of rows, and no choice is read from the device.
    ``kernels``: the module `fused_kernels`, for blocks of few rows, or None.
    """

    def __init__(self, attributes: Mapping[str, Any], kernels: Any = None) -> None:
        self.bits = attributes["expert_weight_bits"]
        self.block = attributes["block_size"]
        self._kernels = kernels

    def __call__(
        self,
        x: Tensor,
        one: Tensor,
        values: Tensor,
        scales: Tensor,
        _: None,
        down_values: Tensor,
        down_scales: Tensor,
        *points: Tensor | None,
    ) -> Tensor:
        """[S, H] of ``x`` [S, H]; ``one`` [S, E] is 1 for the expert of a row, else 0; ``points``: the last two, if any, are zero
        points of the operator's inputs 11 and 12."""
        zeros, down_zeros = points[-2:] if points else (None, None)
        up, down = (values, scales, zeros), (down_values, down_scales, down_zeros)
        rows, experts = one.shape
        size = 1 << (-(-rows // experts) - 1).bit_length()  # at most twice as many blocks as experts
        if size == 1:
            return self._mlp(x.unsqueeze(1), one.argmax(-1), up, down).squeeze(1)
        places, owners = _in_blocks(one, size)
        blocks = x.new_zeros(len(owners) * size, x.shape[1]).index_copy_(0, places, x).unflatten(0, (-1, size))
        return self._mlp(blocks, owners, up, down).flatten(0, 1)[places]

    def _mlp(self, x: Tensor, owners: Tensor, up: _Experts, down: _Experts) -> Tensor:
        """[M, R, H] of blocks ``x`` [M, R, H], whose experts are ``owners`` [M]."""
        gate, linear = self._product(x, owners, up).unflatten(-1, (-1, 2)).unbind(-1)
        return self._product(F.silu(gate) * linear, owners, down)

    def _product(self, x: Tensor, owners: Tensor, weight: _Experts) -> Tensor:
        if self._kernels is not None and x.shape[1] <= self._kernels.MAX_ROWS:
            return self._kernels.low_bit_product(x, *weight, self.bits, self.block, owners)
        values, scales, zeros = weight
        most = max(1, _MAX_DEQUANTISED // (scales.shape[1] * x.shape[2]))
        made = list[Tensor]()
        for part, of in zip(x.split(most), owners.split(most), strict=True):
            chosen = values[of], scales[of], None if zeros is None else zeros[of]
            made.append(part @ dequantised(*chosen, self.bits, self.block).mT)
        return torch.cat(made)


def _in_blocks(one: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The place of each row among blocks of ``size`` rows of one expert, and the expert of each block; for ``one`` see above."""
    (rows, experts), hits = one.shape, one > 0
    ranks = hits.cumsum(0)  # of a row among those of its expert, from 1 on
    needed = (ranks[-1] + size - 1) // size  # blocks of each expert
    ends = needed.cumsum(0)
    blocks = torch.arange((rows + experts * (size - 1)) // size, device=one.device)
    owners = (blocks[:, None] >= ends).sum(1).clamp_(max=experts - 1)  # a block behind the last pair has no expert
    return (((ends - needed) * size + ranks - 1) * hits).sum(1), owners


def look_up(attributes: Mapping[str, Any], kernels: Any = None) -> Any:
    """The function of a look-up; ``kernels``: the module `fused_kernels`, or None."""
    bits, block = attributes["bits"], attributes["block_size"]

    def rows(table: Tensor, ids: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        if kernels is not None:
            return kernels.look_up(table, ids, scales, zeros, bits, block)
        return dequantised(table[ids], scales[ids], None if zeros is None else zeros[ids], bits, block)

    return rows
