"""Smoothing scales: found for each input of products, where they lower the expected rounding error."""

import numpy as np
import torch
from export.architectures import tiny_model

from tide_export.quantize.quantizers import integer_matrices
from tide_export.quantize.smoothing import best_scales, smoothing_scales
from tide_export.sources.parameters import LoadedParameters
from tide_export.weights.quantized_weight import integer_rows


class Rows:
    """A matrix [N, K] as `best_scales` reads one."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.rows, self.read = len(matrix), lambda first, count: matrix[first : first + count]


def error(states: torch.Tensor, matrix: torch.Tensor, scales: torch.Tensor) -> float:
    """Root mean square of what rounding both factors of a product changes."""
    divided = states / scales
    step = divided.abs().amax(1, keepdim=True) / 127
    rounded = (divided / step).round() * step * scales
    weight = torch.from_numpy(integer_rows(matrix.numpy(), scales.numpy()).dequantized())
    return float((rounded @ weight.T - states @ matrix.T).square().mean().sqrt())


def test_features_with_outliers() -> None:
    """A feature a hundred times the others would leave those a few steps of rounding."""
    generator = torch.Generator().manual_seed(0)
    states, matrix = torch.randn(400, 64, generator=generator), torch.randn(96, 64, generator=generator)
    states[:, [3, 40]] *= 100
    scales = best_scales(states, [Rows(matrix[:32]), Rows(matrix[32:])])
    assert error(states, matrix, scales) < 0.4 * error(states, matrix, torch.ones(64))


def test_even_features_stay() -> None:
    """Each input would be divided at the cost of an operator, for nothing."""
    generator = torch.Generator().manual_seed(0)
    states, matrix = torch.randn(400, 64, generator=generator), torch.randn(96, 64, generator=generator)
    assert (best_scales(states, [Rows(matrix)]) == 1).all()


def test_products_of_one_input_share_its_scales() -> None:
    """Query, key and value could not be computed as one product, and their norm not take the division in."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] *= 50
    modules = integer_matrices(model)
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    scales = smoothing_scales(model, LoadedParameters(model), modules, ids)
    assert scales.keys() == modules.keys()
    q, k, v, o = (scales[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkvo")
    assert (q != 1).any() and np.array_equal(q, k) and np.array_equal(q, v) and not np.array_equal(q, o)
