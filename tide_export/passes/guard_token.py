"""The output ``token``: -1 where the largest logit is not finite, for GPUs; left out where the host finds it faster.

With the guard the runtime detects broken logits without copying them from the GPU. Logits are compared in fp32, which holds every
value of the narrower types, because ONNX Runtime's CUDA provider has no bf16 ArgMax.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer


def guard_token(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("guard_token")
    graph = model.graph
    if (token := _token_of_logits(graph)) is None:
        return report
    argmax = token.producer()
    tape = Tape()
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


def leave_out_token(model: ir.Model, context: LoweringContext) -> PassReport:
    """Remove ``token`` from graphs of the CPU: NumPy finds the largest of 49,152 logits in 5 µs, ONNX Runtime's node takes 100.

    In fp16 NumPy takes 0.7 ms, so the node stays.
    """
    report = PassReport("leave_out_token")
    if (token := _token_of_logits(model.graph)) is None:
        return report
    argmax = token.producer()
    assert argmax is not None and argmax.inputs[0] is not None
    if argmax.inputs[0].dtype == ir.DataType.FLOAT:
        model.graph.outputs.remove(token)
        common.RemoveUnusedNodesPass()(model)
        report.applied += 1
    return report


def _token_of_logits(graph: ir.Graph) -> ir.Value | None:
    """The output ``token``, which is the argmax of an output ``logits``; that of a draft head is none."""
    outputs = {value.name: value for value in graph.outputs}
    return outputs.get("token") if "logits" in outputs else None
