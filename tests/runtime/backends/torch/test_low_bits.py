"""Products with the low-bit matrices of a mixture of experts, on CPU torch and on torch's meta device, which has no numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tide_runtime.backends.torch import low_bits
from tide_runtime.backends.torch.low_bits import LowBitExperts, dequantised
from torch import Tensor

EXPERTS, HIDDEN, INNER, BLOCK = 5, 64, 32, 32


class Mixture:
    """Random matrices of `EXPERTS` experts."""

    def __init__(self, bits: int, has_zeros: bool) -> None:
        torch.manual_seed(bits)
        self.bits, self._has_zeros = bits, has_zeros
        self._up, self._down = self._matrices(2 * INNER, HIDDEN), self._matrices(HIDDEN, INNER)

    def __str__(self) -> str:
        return f"{self.bits} bits{', zero points' if self._has_zeros else ''}"

    def _matrices(self, rows: int, columns: int) -> list[Tensor | None]:
        """Values, scales and zero points."""
        blocks = columns // BLOCK
        values = torch.randint(0, 256, (EXPERTS, rows, columns * self.bits // 8), dtype=torch.uint8)
        zeros = torch.randint(0, 256, (EXPERTS, rows, -(-blocks * self.bits // 8)), dtype=torch.uint8)
        return [values, torch.rand(EXPERTS, rows, blocks) / 20, zeros if self._has_zeros else None]

    def product(self, x: Tensor, one: Tensor, kernels: object = None) -> Tensor:
        """What target torch computes; ``one`` [S, E] is 1 for the expert of a row."""
        up, down = ([None if part is None else part.to(x.device) for part in parts] for parts in (self._up, self._down))
        zeros = [None] * 4 + [up[2], down[2]] if self._has_zeros else []
        function = LowBitExperts({"expert_weight_bits": self.bits, "block_size": BLOCK}, kernels)
        return function(x, one, *up[:2], None, *down[:2], *zeros)

    def check(self, chosen: Tensor, kernels: object = None) -> None:
        """Compare with products row by row, of random rows whose experts are ``chosen`` [S]."""
        x = torch.randn(len(chosen), HIDDEN)
        up, down = (dequantised(*parts, self.bits, BLOCK) for parts in (self._up, self._down))
        rows = []
        for row, expert in zip(x, chosen.tolist(), strict=True):
            both = up[expert] @ row
            rows.append(down[expert] @ (F.silu(both[0::2]) * both[1::2]))
        expected, found = torch.stack(rows), self.product(x, F.one_hot(chosen, EXPERTS).float(), kernels)
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


MIXTURES = [Mixture(4, True), Mixture(4, False), Mixture(8, True), Mixture(8, False)]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 5, 6, 13, 160])
@pytest.mark.parametrize("alike", [False, True])
def test_every_row_has_its_own_experts_matrices(
    mixture: Mixture, rows: int, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: tokens get another expert's output, or none, in prompts that choose some experts often and others never."""
    monkeypatch.setattr(low_bits, "_MAX_DEQUANTISED", 5 * INNER * HIDDEN)
    mixture.check(torch.full((rows,), 3) if alike else torch.randint(0, EXPERTS, (rows,)))


@pytest.mark.parametrize("rows", [1, 160])
def test_nothing_is_read_from_the_device(rows: int) -> None:
    """Breaks: decoding on a GPU waits in every layer for the experts' numbers, and cannot be captured in a CUDA graph."""
    x, one = torch.empty(rows, HIDDEN, device="meta"), torch.empty(rows, EXPERTS, device="meta")
    assert MIXTURES[0].product(x, one).shape == x.shape
