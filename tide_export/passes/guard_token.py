"""Set the output ``token`` to -1 where the largest logit is not finite.

The runtime then detects broken logits without copying them from the GPU. Logits are compared in fp32, which holds every value of
the narrower types, because ONNX Runtime's CUDA provider has no bf16 ArgMax.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer


def guard_token(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("guard_token")
    graph = model.graph
    token = next((v for v in graph.outputs if v.name == "token"), None)
    if token is None:
        return report
    argmax, tape = token.producer(), Tape()
    assert argmax is not None
    logits = argmax.inputs[0]
    assert logits is not None and logits.shape is not None
    if logits.dtype != ir.DataType.FLOAT:
        logits = tape.op("Cast", [logits], {"to": ir.DataType.FLOAT})
        argmax.replace_input_with(0, logits)
    axis = array_initializer(graph, "guard.axis", np.array([-1], np.int64))
    largest = array_initializer(graph, "guard.largest", np.array(np.finfo(np.float32).max, np.float32))
    peak = tape.op("Abs", [tape.op("ReduceMax", [logits, axis], {"keepdims": 0})])
    finite = tape.op("LessOrEqual", [peak, largest])  # false for NaN
    graph.insert_before(argmax, tape.nodes)
    token.name = "token.likeliest"
    none = array_initializer(graph, "guard.none", np.array(-1, np.int64))
    guarded = ir.val("token", dtype=ir.DataType.INT64, shape=token.shape)
    graph.insert_after(argmax, [ir.node("Where", [finite, token, none], outputs=[guarded])])
    graph.outputs[list(graph.outputs).index(token)] = guarded
    report.applied += 1
    return report
