"""GGUF's block formats against `gguf.dequantize`, llama.cpp's own reading of them."""

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from tide_export.sources.gguf.file import mapped

# Where a block holds its fp16 scales; bits; block size; whether a format has minima, whose sum with the scale is rounded.
FORMATS: dict[str, tuple[tuple[int, ...], int, int, bool]] = {
    "Q4_0": ((0,), 4, 32, False),
    "Q4_1": ((0, 2), 4, 32, True),
    "Q5_0": ((0,), 8, 32, False),
    "Q5_1": ((0, 2), 8, 32, True),
    "Q8_0": ((0,), 8, 32, False),
    "Q4_K": ((0, 2), 4, 32, True),
    "Q5_K": ((0, 2), 8, 32, True),
    "Q6_K": ((208,), 8, 16, False),
}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random bytes [rows, bytes of a row] with finite scales of both signs, and minima below and above 0."""
    rng = np.random.default_rng(seed)
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, columns // size, width), np.uint8)
    for place in FORMATS[kind][0]:
        half = rng.normal(size=(rows, columns // size, 1)).astype(np.float16)
        data[..., place : place + 2] = half.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_blocks(kind: str) -> None:
    """A wrong nibble, high bit or sub-block scale would give a model that answers with noise."""
    _, bits, block_size, has_minima = FORMATS[kind]
    data = random_blocks(kind, 24, 512)
    expected, weight = gguf.dequantize(data, GGMLQuantizationType[kind]), mapped(data, kind)
    assert weight is not None and (weight.bits, weight.block_size, weight.origin) == (bits, block_size, kind)
    assert weight.shape == expected.shape == (24, 512) and (weight.offsets is not None) == has_minima
    if has_minima:  # a sum of two fp32 products, rounded in another order
        magnitude = np.abs(weight.scales).repeat(block_size, 1) * (1 << bits) + np.abs(weight.offsets).repeat(block_size, 1)
        assert (np.abs(weight.dequantized() - expected) <= 2.0**-23 * magnitude).all()
    else:
        assert np.array_equal(weight.dequantized(), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_of_the_reference_quantizer(kind: str) -> None:
    """With blocks as real files have them, values between the minimum and the maximum, nothing may be rounded."""
    matrix = np.random.default_rng(1).normal(size=(16, 256)).astype(np.float32)
    data = gguf.quantize(matrix, GGMLQuantizationType[kind])
    weight = mapped(data, kind)
    assert weight is not None and np.array_equal(weight.dequantized(), gguf.dequantize(data, GGMLQuantizationType[kind]))
    if weight.offsets is not None:
        assert (np.abs(weight.offsets) <= np.abs(weight.scales) / 2).all()  # the zero point takes the rest


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_of_zeros(kind: str) -> None:
    """The scale of a block without any other value is 0; the division by it must leave no NaN and no warning."""
    data = np.zeros_like(random_blocks(kind, 4, 256))
    with np.errstate(all="raise"):
        weight = mapped(data, kind)
    assert weight is not None and not weight.dequantized().any()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "TQ1_0", "MXFP4"])
def test_other_formats_have_no_mapping(kind: str) -> None:
    """They are dequantised and reported; a mapping by accident would be wrong."""
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert mapped(np.zeros((2, 256 // size * width), np.uint8), kind) is None
