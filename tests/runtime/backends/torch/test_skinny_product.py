"""Products of few tokens in Triton: what they compute, and that a row's bits depend on the row alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from runtime.backends.torch.triton_interpreter import interpreted
from tide_runtime.backends.torch.low_bits import dequantised
from torch import Tensor

if not interpreted():
    pytest.skip("needs Triton, and TRITON_INTERPRET=1: make test-triton", allow_module_level=True)

from tide_runtime.backends.torch.skinny_product import Matrix, Norm, Tiling, skinny_product

WIDTH, OUTPUTS, EPSILON = 320, 200, 1e-5
CUTS = [Tiling(64, 64, 1), Tiling(64, 128, 2), None]  # None: what a matrix of this size gets
HOW = ["plain", "norm", "residual", "norm and gate"]


def _matrix(bits: int, has_zeros: bool = False) -> tuple[Matrix, Tensor]:
    """A weight, and its numbers in float64."""
    if bits == 16:
        weight = (torch.randn(OUTPUTS, WIDTH) / 16).half()
        return Matrix(weight), weight.double()
    values = torch.randint(0, 256, (OUTPUTS, WIDTH * bits // 8), dtype=torch.uint8)
    scales = (torch.rand(OUTPUTS, WIDTH // 32) / 100).half()
    zeros = torch.randint(0, 256, (OUTPUTS, WIDTH // 32 * bits // 8), dtype=torch.uint8) if has_zeros else None
    return Matrix(values, scales, zeros, bits, 32), dequantised(values, scales, zeros, bits, 32).double()


def _squares(x: Tensor) -> Tensor:
    parts = x.float().split(100, -1)
    return torch.stack([(part * part).sum(-1)[0] for part in parts])


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("bits", "has_zeros"), [(16, False), (8, False), (8, True), (4, False), (4, True)])
def test_a_product_with_what_surrounds_it(bits: int, has_zeros: bool, cut: Tiling | None) -> None:
    """Breaks: on a GPU a model computes with other weights, norms, residuals or gates than on a processor."""
    matrix, weight = _matrix(bits, has_zeros)
    rows = 5
    x, residual, gains = torch.randn(1, rows, WIDTH).half(), torch.randn(1, rows, OUTPUTS).half(), torch.rand(WIDTH).half()
    norm = Norm(gains, EPSILON, _squares(x))
    normed = F.rms_norm(x.double(), (WIDTH,), gains.double(), EPSILON)
    plain = x.double() @ weight.T
    gate, up = (normed @ weight.T).chunk(2, -1)
    found = {
        "plain": (skinny_product(x, matrix, cut=cut)[0], plain),
        "residual": (skinny_product(x, matrix, residual=residual, cut=cut)[0], plain + residual.double()),
        "norm": (skinny_product(x, matrix, norm, cut=cut)[0], normed @ weight.T),
        "norm and gate": (skinny_product(x, matrix, norm, gate=True, cut=cut)[0], F.silu(gate) * up),
    }
    for how, (made, expected) in found.items():
        assert ((made.double() - expected).norm() / expected.norm()).item() < 2e-3, how
    total, squares = skinny_product(x, matrix, residual=residual, cut=cut)
    assert squares is not None
    torch.testing.assert_close(squares.sum(0), (total.float() ** 2).sum(-1)[0])


@pytest.mark.parametrize("cut", [CUTS[1], None], ids=str)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_row_has_the_same_bits_whatever_shares_its_launch(bits: int, cut: Tiling | None) -> None:
    """Breaks: a text depends on the drafts that are verified with its tokens, and on the requests beside it."""
    matrix, _ = _matrix(bits)
    x, gains = torch.randn(1, 20, WIDTH).half(), torch.rand(WIDTH).half()
    squares = _squares(x)

    def rows(first: int, last: int) -> Tensor:
        norm = Norm(gains, EPSILON, squares[:, first:last].contiguous())
        return skinny_product(x[:, first:last], matrix, norm, cut=cut)[0]

    whole = rows(0, 20)
    for first, last in [(0, 1), (7, 8), (0, 2), (3, 16), (0, 16), (1, 20)]:
        assert torch.equal(rows(first, last), whole[:, first:last]), (first, last)
