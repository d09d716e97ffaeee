"""Fold Transpose and Identity of a weight into the weight, lazily: the new tensor is computed when the file is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import add_initializer, is_weight
from tide_export.weights.weight_file import Folded


def fold_weights(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("fold_weights")
    graph = model.graph
    for node in list(graph):
        if node.op_type not in ("Transpose", "Identity") or not is_weight(node.inputs[0]):
            continue
        source = node.inputs[0]
        output = node.outputs[0]
        assert source is not None and source.const_value is not None
        if output.is_graph_output():
            report.skip(output.name, "is a graph output")
            continue
        if node.op_type == "Identity":
            folded = source
        else:
            perm = [int(p) for p in node.attributes["perm"].value]
            folded = add_initializer(graph, f"{source.name}.T{''.join(map(str, perm))}", transposed(source.const_value, perm))
        ir.convenience.replace_all_uses_with(output, folded)
        report.applied += 1
    common.RemoveUnusedNodesPass()(model)
    return report


def transposed(tensor: ir.TensorProtocol, perm: Sequence[int]) -> ir.LazyTensor:
    """``tensor`` transposed by ``perm``, computed when read."""
    return Folded([tensor], tuple(perm), [tensor.shape[p] for p in perm], lambda arrays: arrays[0].transpose(perm))


def concatenated(tensors: Sequence[ir.TensorProtocol], axis: int) -> ir.LazyTensor:
    """``tensors`` joined along ``axis``, computed when read."""
    shape = list(tensors[0].shape)
    shape[axis] = sum(int(t.shape[axis]) for t in tensors)
    return Folded(tensors, axis, shape, lambda arrays: np.concatenate(arrays, axis))
