"""Query, key and value by one product."""

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import assert_same_results, assert_untouched, lowered, only, operators, parse, run
from export.passes.group_query import HIDDEN, GroupQuery, step

from tide_export.passes.pack_projections import pack_products, pack_projections
from tide_export.passes.quantized_matmul import lower_quantized_matmul
from tide_export.weights.quantized_weight import unpack_nibbles

NOT_PLAIN = "query, key or value is not a plain projection (normed, sliced or already packed)"
NOT_ALIKE = "query, key and value are projected from different inputs, not all with a bias, or with weights of different forms"


@pytest.mark.parametrize("projections", ["separate", "biased"])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 3), (7, 1)])
def test_one_product_for_three(projections, heads, kv_heads):
    """Queries would be taken for keys, where their widths differ; or lose their bias."""
    attention = GroupQuery(heads, kv_heads, projections=projections)
    before = attention.graph()
    after, report = lowered(pack_projections, before)
    assert (report.applied, report.skipped) == (1, [])
    assert operators(after)["MatMul"] == 2 and operators(after)["Add"] == (projections == "biased")
    packed = after.graph.initializers["key_cache_out_0.packed_weight"].const_value
    assert list(packed.shape) == [HIDDEN, sum(attention.widths.values())]
    assert_same_results(before, after, step(before, [0, 0, 0], 7), 1e-6)


@pytest.mark.parametrize(
    "projections, node, instead, reason",
    [
        ("packed", "", "", NOT_PLAIN),
        ("separate", "k = MatMul(hidden, w_k)", "k_raw = MatMul(hidden, w_k) k = Neg(k_raw)", NOT_PLAIN),
        ("separate", "k = MatMul(hidden, w_k)", "other = Neg(hidden) k = MatMul(other, w_k)", NOT_ALIKE),
        ("biased", "q_product = MatMul(hidden, w_q)\nq = Add(q_product, b_q)", "q = MatMul(hidden, w_q)", NOT_ALIKE),
    ],
)
def test_what_cannot_be_joined_is_left_and_reported(projections, node, instead, reason):
    """A norm on the keys, or a bias, would be lost; the export would not tell why."""
    assert_untouched(pack_projections, GroupQuery(projections=projections).graph(replace=(node, instead)), reason)


@pytest.mark.parametrize("as_output", [True, False])
def test_a_projection_that_is_read_elsewhere(as_output):
    """The product would be computed twice, once alone and once joined with others."""
    model = GroupQuery(projections="biased").graph()
    value = only(model, "GroupQueryAttention").inputs[2]
    if not as_output:
        reader = ir.node("Neg", [value], outputs=[ir.val("negated", dtype=ir.DataType.FLOAT)])
        model.graph.append(reader)
        value = reader.outputs[0]
    model.graph.outputs.append(value)
    assert_untouched(pack_projections, model, NOT_PLAIN)


def quantized(*widths: int, offsets: bool = True, zeros: bool = True) -> ir.Model:
    """Low-bit products of ``x``, y_0, y_1, …."""
    blocks, parts, names = 2, [], []
    for number, width in enumerate(widths):
        given = ["x", f"v{number}", f"s{number}", f"z{number}" if zeros else "", f"o{number}" if offsets else ""]
        parts.append(
            f"y_{number} = tide.QuantizedMatMul<K = 64, N = {width}, bits = 4, block_size = 32>({', '.join(given).rstrip(', ')})"
        )
        shapes = {"v": f"uint8[{width}, {blocks}, 16]", "s": f"float[{width}, {blocks}]"}
        shapes |= {"z": f"uint8[{width}, 1]"} if zeros else {}
        shapes |= {"o": f"float[{width}, {blocks}]"} if offsets else {}
        names += [f"{shape} {kind}{number}" for kind, shape in shapes.items()]
    random = np.random.default_rng(0)
    weights = {f"{k}{n}": random.integers(0, 256, (w, 2, 16) if k == "v" else (w, 1)) for n, w in enumerate(widths) for k in "vz"}
    shown = ", ".join(f"float[1, seq, {width}] out_{number}" for number, width in enumerate(widths))
    body = "\n".join([*parts, *(f"out_{number} = Neg(y_{number})" for number in range(len(widths)))])
    values = ", ".join([*names, *(f"float[1, seq, {width}] y_{number}" for number, width in enumerate(widths))])
    return parse(f"(float[1, seq, 64] x) => ({shown}) <{values}> {{ {body} }}", **weights)


def test_low_bit_products_of_one_input_are_one():
    """Gate and up would be two launches; a part would be taken for another, or lose the bits that it has alone."""
    before = quantized(32, 48)
    alone, _ = lowered(lower_quantized_matmul, before)
    joined, report = lowered(pack_products, before)
    together, _ = lowered(lower_quantized_matmul, joined)
    assert report.applied == 1 and operators(together)["MatMulNBits"] == operators(together)["Split"] == 1
    assert_same_results(alone, together, {"x": np.random.default_rng(1).standard_normal((1, 3, 64), np.float32)})


def test_minima_take_the_zero_points():
    """A product would have other weights than the file's."""
    model = quantized(32)
    after, _ = lowered(lower_quantized_matmul, model)
    assert len(only(after, "MatMulNBits").inputs) == 3
    x = np.random.default_rng(1).standard_normal((1, 3, 64)).astype(np.float32)
    given = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    values = unpack_nibbles(given["v0"].reshape(32, -1)).reshape(32, 2, 32)
    zeros = unpack_nibbles(given["z0"])[:, :2, None]
    weight = given["s0"][..., None] * (values - zeros.astype(np.float32)) + given["o0"][..., None]
    expected = -x @ weight.reshape(32, 64).T
    found = run(after, {"x": x})["out_0"]
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()  # activations are rounded to int8
