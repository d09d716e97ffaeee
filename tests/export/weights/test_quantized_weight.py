"""The form of a low-bit matrix: its meaning, its bytes for ONNX Runtime, and what may be done to it without a change."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tide_export.weights.quantized_weight import QuantizedWeight, stacked


def random_weight(
    bits: int = 4, rows: int = 5, blocks: int = 3, size: int = 32, zeros: bool = True, offsets: bool = True, seed: int = 0
) -> QuantizedWeight:
    """Powers of 2 as scales and offsets: products and sums with them are exact."""
    rng = np.random.default_rng(seed)
    return QuantizedWeight(
        bits,
        rng.integers(0, 1 << bits, (rows, blocks * size), np.uint8),
        np.exp2(rng.integers(-3, 3, (rows, blocks)), dtype=np.float32),
        rng.integers(0, 1 << bits, (rows, blocks), np.uint8) if zeros else None,
        np.exp2(rng.integers(-3, 3, (rows, blocks)), dtype=np.float32) if offsets else None,
        origin="made up",
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("zeros", "offsets"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_formula_element_by_element(bits: int, zeros: bool, offsets: bool) -> None:
    """Every reader and every quantizer states its weights by this formula."""
    weight = random_weight(bits, rows=2, blocks=2, size=16, zeros=zeros, offsets=offsets)
    matrix = weight.dequantized()
    assert matrix.dtype == np.float32 and weight.shape == matrix.shape == (2, 32) and weight.block_size == 16
    for (n, k), found in np.ndenumerate(matrix):
        b = k // 16
        zero = int(weight.zero_points[n, b]) if weight.zero_points is not None else 1 << (bits - 1)
        offset = float(weight.offsets[n, b]) if weight.offsets is not None else 0.0
        assert found == float(weight.scales[n, b]) * (int(weight.values[n, k]) - zero) + offset


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_packed_bytes(bits: int, blocks: int) -> None:
    """The kernels would read the second value of a byte first, or the next row's zero points where their number is odd."""
    weight = random_weight(bits, blocks=blocks)
    values, zeros = weight.packed_values(), weight.packed_zero_points()
    assert zeros is not None and weight.zero_points is not None
    assert values.shape == (5, blocks, 32 * bits // 8) and zeros.shape == (5, -(-blocks * bits // 8))
    assert values.dtype == zeros.dtype == np.uint8
    for packed, plain in ((values.reshape(5, -1), weight.values), (zeros, weight.zero_points)):
        unpacked = packed if bits == 8 else np.stack([packed % 16, packed // 16], -1).reshape(5, -1)
        assert np.array_equal(unpacked[:, : plain.shape[1]], plain) and not unpacked[:, plain.shape[1] :].any()
    assert random_weight(zeros=False).packed_zero_points() is None


def test_rows_take_all_their_parts_along() -> None:
    """A permuted query projection would be read with another row's scales."""
    weight, order = random_weight(), np.array([3, 0, 4, 4])
    assert np.array_equal(weight.rows(order).dequantized(), weight.dequantized()[order])
    plain = random_weight(zeros=False, offsets=False).rows(order)
    assert plain.zero_points is None and plain.offsets is None and plain.origin == "made up"


def test_stacked_matrices() -> None:
    """A packed projection without zero points or offsets would get those of its neighbour, or all would lose theirs."""
    parts = [
        random_weight(rows=rows, zeros=zeros, offsets=offsets, seed=rows)
        for rows, zeros, offsets in ((2, True, False), (3, False, True), (4, False, False))
    ]
    for some in (parts, parts[::-1], parts[:1], parts[2:]):
        joined = stacked(some)
        assert joined is not None and np.array_equal(joined.dequantized(), np.concatenate([w.dequantized() for w in some]))
    alone = stacked(parts[2:])
    assert alone is not None and alone.zero_points is None and alone.offsets is None


@pytest.mark.parametrize("other", [{"bits": 8}, {"size": 16}, {"blocks": 4}])
def test_other_forms_are_not_stacked(other: dict[str, Any]) -> None:
    """One product has one number of bits, one block size and one input width."""
    assert stacked([random_weight(), random_weight(**other)]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"scales": np.ones((5, 5), np.float32)}, "no whole blocks"),
        ({"scales": np.ones((5, 0), np.float32)}, "no whole blocks"),
        ({"scales": np.ones(3, np.float32)}, "no whole blocks"),
        ({"scales": np.ones((4, 3), np.float32)}, r"scales has shape \(4, 3\), expected \(5, 3\)"),
        ({"zero_points": np.ones((5, 2), np.uint8)}, r"zero_points has shape \(5, 2\)"),
        ({"offsets": np.ones((3, 5), np.float32)}, r"offsets has shape \(3, 5\)"),
    ],
)
def test_parts_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    """A reader's mistake would be found as noise in the model's answers."""
    with pytest.raises(ValueError, match=message):
        replace(random_weight(), **change)
