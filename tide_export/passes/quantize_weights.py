"""Replace products with a low-bit weight by ``tide::QuantizedMatMul``, and look-ups in a low-bit embedding.

``tide::QuantizedMatMul(x, values, scales, zero_points, offsets)``: x [B, S, K] times the transposed matrix [N, K] of a
`QuantizedWeight`; ``zero_points`` and ``offsets`` may be absent. Attributes K, N, bits, block_size. Later passes pack projections
and lower it to what a target has (`lower_quantized_matmul`, `lower_dequantize_linear`). ONNX Runtime's GatherBlockQuantized reads
the embedding; a tied head reads the same bytes. The first pass of a target: folding takes the names from parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.model.traced_attention import DOMAIN
from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import add_initializer, as_type_of, insert_before, is_weight, new_value, produced_by
from tide_export.passes.quantize_experts import UP, quantize_experts
from tide_export.passes.smoothing import factors_of, smoothed
from tide_export.weights.deferred_weight import DeferredWeight, LowBits
from tide_export.weights.quantized_weight import QuantizedWeight

QUANTIZE_WEIGHTS = "quantize_weights"  # name in the reports
QUANTIZED_MATMUL = "QuantizedMatMul"
MIN_BLOCK = 16  # smallest block size of GatherBlockQuantized; blocks are powers of two
NO_LOW_BITS = "the target has no products with low-bit weights"


@dataclass(frozen=True)
class QuantizeWeights:
    """The pass for a target that takes certain low-bit weights; all others stay dequantised, each with a reason in the report.

    Args:
        bits: of the weights that the target multiplies with, of 4 and 8; empty if it takes none.
        look_ups: whether the target also reads the embedding in low bits.
        multiple: the output features N of a weight must be a multiple of this.
        integers: whether it has products of integers, whose input is rounded row by row.
        experts: types of the states that the target multiplies with the matrices of experts in low bits; empty: none.
    """

    bits: tuple[int, ...]
    look_ups: bool = False
    multiple: int = 1
    integers: bool = False
    experts: tuple[ir.DataType, ...] = ()

    def __call__(self, model: ir.Model, context: LoweringContext) -> PassReport:
        report = PassReport(QUANTIZE_WEIGHTS)
        graph = model.graph
        for node in list(graph) if context.quantized else ():
            if node.op_type in ("MatMul", "Gemm"):  # torch makes a Gemm of a linear layer whose input has two dimensions
                self._product(graph, node, context, report)
            elif node.op_type == "Gather":
                self._look_up(graph, node, context, report)
        if report.applied:
            model.opset_imports[DOMAIN] = model.opset_imports[MS_DOMAIN] = 1
            common.RemoveUnusedNodesPass()(model)
        return report

    def _product(self, graph: ir.Graph, node: ir.Node, context: LoweringContext, report: PassReport) -> None:
        factor = node.inputs[1]
        transpose = produced_by(factor, "Transpose")
        parameter = transpose.inputs[0] if transpose is not None else factor
        by_rows = (transpose is not None) != (_attribute(node, "transB", 0) == 1)
        weight = context.quantized_weight(parameter.name) if is_weight(parameter) else None
        if weight is None:
            return
        stored = tuple(int(size) for size in parameter.const_value.shape)
        reason = self._refusal(weight)
        if (stored if by_rows else stored[::-1]) != weight.shape:
            reason = "the product takes the weight in another shape than it is stored in"
        if _attribute(node, "transA", 0) or _attribute(node, "alpha", 1.0) != 1 or _attribute(node, "beta", 1.0) != 1:
            reason = "the product is scaled, or its input transposed"
        if reason:
            report.skip(node.outputs[0].name, reason)
            return
        _quantize_product(graph, node, parameter.name, weight)
        report.applied += 1

    def _look_up(self, graph: ir.Graph, node: ir.Node, context: LoweringContext, report: PassReport) -> None:
        table = node.inputs[0]
        axis = node.attributes["axis"].value if "axis" in node.attributes else 0
        weight = context.quantized_weight(table.name) if is_weight(table) and axis == 0 else None
        if weight is None:
            return
        if len(table.shape) == 3:  # matrices of experts, which their tokens choose
            if (table.name or "").endswith(UP):
                self._experts(graph, node, context, report)
            return
        reason = "" if self.look_ups else "the embedding is looked up in full precision"
        if self.look_ups and weight.has_offsets:
            reason = "the embedding's blocks have a minimum, which the look-up does not take"
        if self.look_ups and weight.shape[1] % MIN_BLOCK:
            reason = f"the embedding is no multiple of {MIN_BLOCK} wide"
        if reason:
            report.skip(node.outputs[0].name, reason)
            return
        _quantize_embedding(graph, node, weight)
        report.applied += 1

    def _experts(self, graph: ir.Graph, node: ir.Node, context: LoweringContext, report: PassReport) -> None:
        where = node.outputs[0].name
        reason = "the target multiplies with the matrices of experts in full precision"
        if self.experts:
            reason = quantize_experts(graph, node, MS_DOMAIN, context, self.experts)
        if reason:
            report.skip(where, reason)
        else:
            report.applied += 1

    def _refusal(self, weight: LowBits) -> str:
        """Why the target does not multiply with ``weight`` as it is; empty if it does."""
        if weight.smoothing is not None:
            return "" if self.integers else "the target has no products of integers"
        if weight.bits not in self.bits:
            return f"the target multiplies with weights of {self.bits[0]} bits, not {weight.bits}" if self.bits else NO_LOW_BITS
        if weight.shape[0] % self.multiple:
            return f"the target takes low-bit weights whose output is a multiple of {self.multiple} wide"
        return ""


def _attribute(node: ir.Node, name: str, default: float) -> float:
    return float(node.attributes[name].value) if name in node.attributes else default


def _quantize_product(graph: ir.Graph, node: ir.Node, parameter: str | None, weight: LowBits) -> None:
    output = node.outputs[0]
    source = node.inputs[0]
    features, columns = weight.shape
    name = output.name
    product = new_value(f"{output.name}.quantized", output, output.shape)
    attributes = {"K": columns, "N": features, "bits": weight.bits, "block_size": weight.block_size}
    if weight.smoothing is not None:
        source, attributes["integers"] = smoothed(graph, node, weight.smoothing), 1
    quantized = ir.node(
        QUANTIZED_MATMUL,
        [source, *_weight_values(graph, parameter, weight)],
        attributes=attributes,
        domain=DOMAIN,
        outputs=[product],
    )
    insert_before(graph, node, quantized)
    result = product
    if len(node.inputs) > 2:  # the bias of a Gemm
        result = new_value(f"{name}.biased", output, output.shape)
        insert_before(graph, node, ir.node("Add", [product, node.inputs[2]], outputs=[result]))
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    output.name = f"{name}.dense"
    result.name = name


def _weight_values(graph: ir.Graph, name: str | None, weight: LowBits) -> list[ir.Value | None]:
    """Values, scales, zero points and offsets as initializers, each made when it is written."""
    rows, columns = weight.shape
    blocks = columns // weight.block_size

    def part(kind: str, array: Callable[[QuantizedWeight], Any], dtype: ir.DataType, *shape: int) -> ir.Value:
        tensor = ir.LazyTensor(lambda: ir.tensor(array(weight.materialize())), dtype=dtype, shape=ir.Shape(shape))
        return add_initializer(graph, f"{name}.{kind}", tensor)

    block_bytes = weight.block_size * weight.bits // 8
    zero_bytes = -(-blocks * weight.bits // 8)
    return [
        part("values", QuantizedWeight.packed_values, ir.DataType.UINT8, rows, blocks, block_bytes),
        part("scales", attrgetter("scales"), ir.DataType.FLOAT, rows, blocks),
        part("zero_points", QuantizedWeight.packed_zero_points, ir.DataType.UINT8, rows, zero_bytes)
        if weight.has_zero_points
        else None,
        part("offsets", attrgetter("offsets"), ir.DataType.FLOAT, rows, blocks) if weight.has_offsets else None,
    ]


def _in_blocks(weight: LowBits) -> LowBits:
    """The form that look-ups take of a head of integer products: each row's scale is repeated for every block of the row."""
    if weight.smoothing is None:
        return weight
    columns = weight.shape[1]
    block = MIN_BLOCK
    while not columns % (2 * block):
        block *= 2

    def make() -> QuantizedWeight:
        made = weight.materialize()
        return replace(made, scales=np.repeat(made.scales, columns // block, 1), smoothing=None)

    return DeferredWeight(weight.bits, weight.shape, block, False, False, weight.origin, make)


def _quantize_embedding(graph: ir.Graph, node: ir.Node, weight: LowBits) -> None:
    table = node.inputs[0]
    output = node.outputs[0]
    rows, columns = weight.shape
    smoothing = weight.smoothing
    weight = _in_blocks(weight)
    flat = ir.Shape([rows, columns * weight.bits // 8])
    values = ir.LazyTensor(
        lambda: ir.tensor(weight.materialize().packed_values().reshape(rows, -1)), dtype=ir.DataType.UINT8, shape=flat
    )
    _, scales, zeros, _ = _weight_values(graph, f"{table.name}.look_up", weight)
    looked_up = ir.node(
        "GatherBlockQuantized",
        [
            add_initializer(graph, f"{table.name}.rows", values),
            node.inputs[1],
            as_type_of(graph, table, scales),
            *([zeros] if zeros is not None else []),
        ],
        attributes={"bits": weight.bits, "block_size": weight.block_size, "gather_axis": 0, "quantize_axis": 1},
        domain=MS_DOMAIN,
        outputs=[new_value(f"{output.name}.quantized", output, output.shape)],
    )
    insert_before(graph, node, looked_up)
    result = looked_up.outputs[0]
    if smoothing is not None:
        result = new_value(f"{output.name}.smoothed", output, output.shape)
        insert_before(graph, node, ir.node("Mul", [looked_up.outputs[0], factors_of(graph, smoothing)], outputs=[result]))
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    output.name, result.name = f"{output.name}.dense", output.name
