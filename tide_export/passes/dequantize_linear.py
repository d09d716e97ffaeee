"""Lower ``tide::QuantizedMatMul`` of 4 bits to DequantizeLinear and MatMul, which TensorRT compiles into one product.

TensorRT's int4 is signed and has no zero points: ``values - 8`` [K, N] with a scale for each block of K. Zero points and offsets
are the same amount for all values of a block, so their part of a product is Σ_b shift[n, b] · Σ_{k in b} x[k], with
``shift = offsets + scales · (8 - zero_points)``: sums over blocks, which products of the same input share, times a small matrix.

TensorRT-RTX 1.7 fuses both nodes for blocks of 16, 32, 64 and 128 from Ampere on; Turing has no int4. Weights of 8 bits, and of
an odd N, it dequantises in a kernel of their own, which writes the dense matrix in every step: they stay dense.
"""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.block_offsets import BlockOffsets
from tide_export.passes.fold_weights import transposed
from tide_export.passes.graph_walk import add_initializer, as_type_of, insert_before, new_value
from tide_export.passes.quantize_weights import QUANTIZED_MATMUL, QuantizeWeights
from tide_export.weights.quantized_weight import unpack_nibbles

_ZERO = 8
_AMPERE = 80


def weight_only_int4(compute: Iterable[int]) -> QuantizeWeights:
    """The pass before this one, for GPUs of these compute capabilities (times ten)."""
    return QuantizeWeights((4,) if min(compute) >= _AMPERE else (), multiple=2)


def lower_dequantize_linear(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("dequantize_linear")
    graph = model.graph
    blocks = BlockOffsets(graph)
    for node in [n for n in graph if n.op_type == QUANTIZED_MATMUL]:
        _lower(graph, node, blocks)
        report.applied += 1
    if report.applied:
        common.RemoveUnusedNodesPass()(model)
    return report


def _lower(graph: ir.Graph, node: ir.Node, blocks: BlockOffsets) -> None:
    source, values, scales, zeros, offsets = (*node.inputs, None, None)[:5]
    output = node.outputs[0]
    block_size = node.attributes["block_size"].value
    name, shape = output.name, output.shape
    signed = add_initializer(graph, f"{values.name}.int4", _signed(values.const_value))
    factors = add_initializer(graph, f"{scales.name}.T", transposed(scales.const_value, [1, 0]))
    weight = ir.node(
        "DequantizeLinear",
        [signed, as_type_of(graph, source, factors)],
        attributes={"axis": 0, "block_size": block_size},
        outputs=[new_value(f"{name}.weight", source, signed.shape)],
    )
    product = ir.node("MatMul", [source, weight.outputs[0]], outputs=[new_value(f"{name}.product", output, shape)])
    insert_before(graph, node, weight, product)
    result = product.outputs[0]
    if zeros is not None or offsets is not None:
        shift = add_initializer(graph, f"{scales.name}.shift", _shift(scales, zeros, offsets))
        result = blocks.added(node, result, shift)
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    output.name = f"{name}.marker"
    result.name = name


def _signed(packed: ir.TensorProtocol) -> ir.LazyTensor:
    """uint8 [N, blocks, block_size / 2] → int4 [K, N]."""
    rows, blocks, width = (int(size) for size in packed.shape)

    def make() -> ir.TensorProtocol:
        values = unpack_nibbles(packed.numpy().reshape(rows, -1)).astype(np.int8) - _ZERO
        return ir.Tensor(np.ascontiguousarray(values.T).astype(ml_dtypes.int4), dtype=ir.DataType.INT4)

    return ir.LazyTensor(make, dtype=ir.DataType.INT4, shape=ir.Shape([blocks * width * 2, rows]))


def _shift(scales: ir.Value, zeros: ir.Value | None, offsets: ir.Value | None) -> ir.TensorProtocol:
    """fp32 [blocks, N]: what is added to each value of a block."""
    factors = scales.const_value.numpy()
    shift = offsets.const_value.numpy() if offsets is not None else np.zeros_like(factors)
    if zeros is not None:
        shift = shift + factors * (_ZERO - unpack_nibbles(zeros.const_value.numpy())[:, : factors.shape[1]].astype(np.float32))
    return ir.tensor(np.ascontiguousarray(shift.T))
