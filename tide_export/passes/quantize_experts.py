"""Replace the products of a mixture of experts whose weights are in few bits by ONNX Runtime's QMoE.

QMoE adds the outputs of a row's experts in an order that depends on the launch's other rows. So each pair of a token and one of
its experts is a row, and the graph adds a token's rows: its result has the same bits in any company, at the speed of QMoE with
all experts of a row. With fp32 matrices gathered for each row a model of four layers with 32 experts of 1024 × 512, six a token,
took 22 times as long for a token, and 22 times for a prompt of 64.

    one   = 1 where a row's expert is e, else 0        [S, E]     Equal, Cast
    y     = expert(x)                                  [S, H]     QMoE: x [S, H], router_probs = one, k = 1

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.QMoE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from tide_export.passes.base import LoweringContext
from tide_export.passes.graph_walk import (
    add_initializer,
    array_initializer,
    as_type_of,
    insert_before,
    new_value,
    produced_by,
)
from tide_export.weights.deferred_weight import LowBits
from tide_export.weights.quantized_weight import QuantizedWeight

UP, DOWN = ".gate_up_proj", ".down_proj"  # names of transformers' parameters, [E, 2I, H] and [E, H, I]
_ACCURACY_LEVEL = 4  # activations are rounded to int8, as in MatMulNBits


def quantize_experts(
    graph: ir.Graph, gather: ir.Node, domain: str, context: LoweringContext, dtypes: Sequence[ir.DataType]
) -> str:
    """Replace the experts whose gate and up matrices ``gather`` reads, and whose rows are of one of ``dtypes``. Returns why not,
    or nothing."""
    name = (gather.inputs[0].name or "").removesuffix(UP)
    up, down = (context.quantized_weight(f"{name}{part}") for part in (UP, DOWN))
    table = graph.initializers.get(f"{name}{DOWN}")
    other = next((use.node for use in table.uses() if use.node.op_type == "Gather"), None) if table is not None else None
    rows = _column(gather)
    output = _product(other)
    if up is None or down is None or other is None or rows is None or output is None:
        return "the products of the experts are not those of the trace"
    if up.has_offsets or down.has_offsets:
        return "the experts' blocks have a minimum, which their product in low bits does not take"
    if rows.dtype not in dtypes:
        return "the target multiplies with the matrices of experts in low bits in fp32 only"
    experts = int(gather.inputs[0].shape[0])
    weights = [_weights(graph, f"{name}{UP}", up, experts, _interleaved), _weights(graph, f"{name}{DOWN}", down, experts)]
    (values, scales, zeros), (down_values, down_scales, down_zeros) = weights
    scales, down_scales = as_type_of(graph, rows, scales), as_type_of(graph, rows, down_scales)
    one, nodes = _one_of(graph, name, gather.inputs[1], experts, rows.dtype)
    zero_points: list[ir.Value | None] = [*[None] * 4, zeros, down_zeros] if zeros is not None else []
    product = ir.node(
        "QMoE",
        [rows, one, values, scales, None, down_values, down_scales, *zero_points],
        attributes={
            "k": 1,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
            "expert_weight_bits": up.bits,
            "block_size": up.block_size,
            "accuracy_level": _ACCURACY_LEVEL,
            "weights_prepacked": 0,
        },
        domain=domain,
        outputs=[new_value(f"{output.name}.quantized", output, output.shape)],
    )
    node = output.producer()
    assert node is not None
    insert_before(graph, node, *nodes, product)
    ir.convenience.replace_all_uses_with(output, product.outputs[0])
    return ""


def _column(gather: ir.Node) -> ir.Value | None:
    """x [S, H] of the product of the gathered matrices [S, N, H] and x as columns [S, H, 1]."""
    product = _only_user(gather, "MatMul")
    column = produced_by(product.inputs[1], "Unsqueeze") if product is not None else None
    return column.inputs[0] if column is not None else None


def _product(gather: ir.Node | None) -> ir.Value | None:
    """The product of the gathered matrices and columns as rows [S, N]."""
    squeezed = _only_user(_only_user(gather, "MatMul"), "Squeeze")
    return squeezed.outputs[0] if squeezed is not None else None


def _only_user(node: ir.Node | None, op_type: str) -> ir.Node | None:
    users = [use.node for use in node.outputs[0].uses()] if node is not None else []
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None


def _one_of(graph: ir.Graph, name: str, ids: ir.Value, experts: int, dtype: ir.DataType) -> tuple[ir.Value, list[ir.Node]]:
    """1 in the column of each row's expert [S, E], and the nodes that make it of the ``ids`` [S]."""
    last = array_initializer(graph, "experts.last", np.array([-1], np.int64))
    numbers = array_initializer(graph, f"experts.{experts}", np.arange(experts))
    column = ir.node("Unsqueeze", [ids, last], outputs=[new_value(f"{name}.column", ids)])
    chosen = ir.node("Equal", [column.outputs[0], numbers], outputs=[new_value(f"{name}.chosen")])
    chosen.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
    one = ir.node("Cast", [chosen.outputs[0]], {"to": dtype}, outputs=[new_value(f"{name}.one")])
    one.outputs[0].type = ir.TensorType(dtype)
    return one.outputs[0], [column, chosen, one]


def _interleaved(weight: QuantizedWeight, experts: int) -> QuantizedWeight:
    """Rows gate 0, up 0, gate 1, up 1, … of every expert, which has all of gate before up."""
    rows = np.arange(weight.shape[0]).reshape(experts, 2, -1)
    return weight.rows(rows.swapaxes(1, 2).reshape(-1))


def _weights(
    graph: ir.Graph,
    name: str,
    weight: LowBits,
    experts: int,
    ordered: Callable[[QuantizedWeight, int], QuantizedWeight] = lambda weight, experts: weight,
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Values [E, N, K / 2], scales [E, N, K / block] and zero points of the matrices as initializers, made when written."""
    rows, columns = weight.shape
    blocks = columns // weight.block_size

    def part(kind: str, array: Callable[[QuantizedWeight], Any], dtype: ir.DataType, width: int) -> ir.Value:
        shape = (experts, rows // experts, width)
        make = lambda: ir.tensor(array(ordered(weight.materialize(), experts)).reshape(shape))  # noqa: E731
        return add_initializer(graph, f"{name}.{kind}", ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape)))

    bits = weight.bits
    values = part("values", QuantizedWeight.packed_values, ir.DataType.UINT8, columns * bits // 8)
    scales = part("scales", lambda one: one.scales, ir.DataType.FLOAT, blocks)
    if not weight.has_zero_points:
        return values, scales, None
    return values, scales, part("zero_points", QuantizedWeight.packed_zero_points, ir.DataType.UINT8, -(-blocks * bits // 8))
