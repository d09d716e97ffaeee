"""The exit router as an ONNX function of standard operators, by whose name targets find it and put a fused kernel in its place.

    tide.TideExitRouter   hidden [..., H] T, down [R, H], down_bias [R], up [R], up_bias [1] float32 → score [...] float32

    score = sigmoid(up · silu(down · rmsnorm(hidden) + down_bias) + up_bias)        computed in float32, whatever T

ONNX Runtime inlines the function when it loads a file, and so does TensorRT's parser. The exporter puts the kernels into engines
of TensorRT (`targets.router_plugin`), target torch runs them for the node; the operators are their reference.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.trace.trace_model import OPSET

DOMAIN = "tide"
NAME = "TideExitRouter"
VERSION = 1
INPUTS = ("hidden", "down", "down_bias", "up", "up_bias")


def router_function() -> ir.Function:
    """The function's definition, the same for all exits of all models."""
    tape = Tape()
    hidden, down, down_bias, up, up_bias = inputs = [ir.val(name) for name in INPUTS]
    wide = tape.op("Cast", [hidden], {"to": ir.DataType.FLOAT})
    epsilon = ir.RefAttr("epsilon", "epsilon", ir.AttributeType.FLOAT)
    normed = tape.op("RMSNormalization", [wide, ones(tape, down)], {"axis": -1, "epsilon": epsilon, "stash_type": 1})
    inner = tape.op("Add", [tape.op("MatMul", [normed, tape.op("Transpose", [down], {"perm": [1, 0]})]), down_bias])
    silu = tape.op("Mul", [inner, tape.op("Sigmoid", [inner])])
    score = tape.op("Sigmoid", [tape.op("Add", [tape.op("MatMul", [silu, up]), up_bias])])  # [..., R] · [R]
    score.name = "score"
    graph = ir.Graph(inputs, [score], nodes=tape.nodes, opset_imports={"": OPSET}, name=NAME)
    return ir.Function(DOMAIN, NAME, graph=graph, attributes=[ir.Attr("epsilon", ir.AttributeType.FLOAT, 1e-6)])


def ones(tape: Tape, down: ir.Value) -> ir.Value:
    """Ones [H] of a matrix [R, H]: the weight of a norm without weight, which the operator requires.

    It is computed from the matrix, because a function holds no tensors; a runtime folds it at load.
    """
    size = tape.op("Shape", [down], {"start": 1, "end": 2})
    return tape.op("ConstantOfShape", [size], {"value": ir.tensor(np.ones(1, np.float32))})
