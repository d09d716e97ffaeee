"""Products of integers: their formula, the same bits for a row in every launch, and inputs divided at no cost."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from export.passes.graphs import operators, parse

from tide_export.passes.base import LoweringContext, run_passes
from tide_export.passes.integer_products import lower_integer_products
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.passes.smoothing import fold_smoothing
from tide_export.weights.quantized_weight import QuantizedWeight, integer_rows

RANDOM = np.random.default_rng(0)
K, N = 64, 48
STATES = RANDOM.standard_normal((1, 70, K)).astype(np.float32)


def weight(rows: int, columns: int, smooth: bool) -> QuantizedWeight:
    scales = RANDOM.uniform(0.5, 2, columns).astype(np.float32) if smooth else np.ones(columns, np.float32)
    return integer_rows(RANDOM.standard_normal((rows, columns)).astype(np.float32), scales)


def graph(nodes: str, weights: dict[str, QuantizedWeight], out: int, **others: np.ndarray) -> ir.Model:
    """A graph from x [1, S, K] to y [1, S, ``out``] whose products read the ``weights``, with their dequantised values."""
    arrays = {name: one.dequantized().T for name, one in weights.items()} | others
    declared = ", ".join(f"float[{','.join(map(str, array.shape))}] {name}" for name, array in arrays.items())
    return parse(f"(float[1, S, {K}] x) => (float[1, S, {out}] y) <{declared}> {{ {nodes} }}", **arrays)


def in_integers(model: ir.Model, weights: dict[str, QuantizedWeight]) -> tuple[ir.Model, list[str]]:
    """The lowered graph, and why inputs are divided by an operator of their own."""
    context = LoweringContext(16, quantized=weights)
    reports = run_passes(model, (QuantizeWeights((), integers=True), fold_smoothing, lower_integer_products), context)
    return model, reports[1].skipped


def run(model: ir.Model, states: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": states})[0]


def expected(states: np.ndarray, matrix: QuantizedWeight) -> np.ndarray:
    divided = states / matrix.smoothing
    largest = np.abs(divided).max(-1, keepdims=True)
    integers = np.rint(divided / largest * 127).astype(np.int64)
    sums = integers @ (matrix.values.astype(np.int64) - 128).T
    return sums * largest / 127 * matrix.scales[:, 0]


@pytest.mark.parametrize("smooth", [False, True])
def test_formula(smooth: bool) -> None:
    """A wrong zero point, scale or order of the matrix; or factors that are not divided out again."""
    matrix = weight(N, K, smooth)
    model, _ = in_integers(graph("y = MatMul(x, w)", {"w": matrix}, N), {"w": matrix})
    assert operators(model)["MatMulIntegerToFloat"] == 1 and operators(model)["MatMul"] == 0
    assert np.abs(run(model, STATES) - expected(STATES, matrix)).max() <= 1e-3 * np.abs(expected(STATES, matrix)).max()


def test_a_row_has_its_bits_in_every_launch() -> None:
    """A text would depend on the batch and on its drafts. A row of zeros, as padding is, must not spoil others."""
    matrix = weight(N, K, True)
    model, _ = in_integers(graph("y = MatMul(x, w)", {"w": matrix}, N), {"w": matrix})
    states = STATES.copy()
    states[:, 5] = 0
    whole = run(model, states)
    assert np.isfinite(whole).all() and (whole[:, 5] == 0).all()
    for size in (1, 2, 3, 8, 16, 33):
        parts = [run(model, states[:, first : first + size]) for first in range(0, 66, size)]
        assert np.concatenate(parts, 1)[:, :66].tobytes() == whole[:, : len(parts) * size][:, :66].tobytes()


@pytest.mark.parametrize(
    "nodes, others, out",
    [
        ("n = RMSNormalization <axis = -1> (x, norm) y = MatMul(n, w)", {"norm": K}, N),
        ("n = LayerNormalization <axis = -1> (x, norm, shift) y = MatMul(n, w)", {"norm": K, "shift": K}, N),
        ("u = MatMul(x, up) g = Sigmoid(x) h = Mul(g, u) y = MatMul(h, w)", {}, N),
        ("p = MatMul(x, up) u = Add(p, shift) g = Sigmoid(x) h = Mul(u, g) y = MatMul(h, w)", {"shift": K}, N),
    ],
)
def test_norms_and_products_take_the_division_in(nodes: str, others: dict[str, int], out: int) -> None:
    """Each would be an operator of its own in each layer; or it would be taken into one factor of the wrong value."""
    weights = {"w": weight(N, K, True)} | ({"up": weight(K, K, False)} if "up" in nodes else {})
    arrays = {name: RANDOM.standard_normal(size).astype(np.float32) for name, size in others.items()}
    plain = graph(nodes, weights, out, **arrays)
    wanted = run(plain, STATES)
    model, left = in_integers(graph(nodes, weights, out, **arrays), weights)
    assert left == [] and operators(model)["Smooth"] == 0
    assert np.abs(run(model, STATES) - wanted).max() <= 0.05 * np.abs(wanted).max()


def test_an_input_that_others_read_is_divided_beside_them() -> None:
    """What else reads a norm, such as the gate of experts, would see it divided."""
    matrix = weight(K, K, True)
    nodes = "n = RMSNormalization <axis = -1> (x, norm) p = MatMul(n, w) y = Add(p, n)"
    norm = RANDOM.standard_normal(K).astype(np.float32)
    wanted = run(graph(nodes, {"w": matrix}, K, norm=norm), STATES)
    model, left = in_integers(graph(nodes, {"w": matrix}, K, norm=norm), {"w": matrix})
    assert len(left) == 1 and "no norm" in left[0]
    assert np.abs(run(model, STATES) - wanted).max() <= 0.05 * np.abs(wanted).max()


def test_targets_without_integer_products_multiply_dense() -> None:
    """They would get a product that no later pass lowers."""
    matrix = weight(N, K, True)
    model = graph("y = MatMul(x, w)", {"w": matrix}, N)
    [report] = run_passes(model, (QuantizeWeights((4, 8)),), LoweringContext(16, quantized={"w": matrix}))
    assert operators(model)["MatMul"] == 1 and "products of integers" in report.skipped[0]
