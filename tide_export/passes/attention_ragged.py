"""Have GroupQueryAttention take its older kernel, for one token each of several rows of different lengths.

Since 1.29 ONNX Runtime computes fp32 attention by a kernel that takes rows of equal lengths together, and others one after the
other, each shared out over the threads by its few heads (https://github.com/microsoft/onnxruntime/pull/29216). The kernel before
it shares out the heads of all rows at once; it still serves what the new one does not know. Head sinks are such a thing: a
logit of each head that takes part in the softmax and has no value. Sinks that weigh nothing change no other bit: exp(-1e30) = 0.

benchmarks/attention_forms.py measures both. It pays most where heads do not divide by the threads: with 3 heads, two for one
thread and one for the other, a decode step of 8 rows takes 0.7 to 0.9 times as long (two cores; docs/measured.md).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tide_export.passes.attention_gqa import head_sink, set_head_sink
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer

_WEIGHTLESS = -1e30


def lower_attention_ragged(model: ir.Model, context: LoweringContext) -> PassReport:
    """Applies to none where the newer kernel does not, in fp16, with a soft-cap and with the model's own sinks, and to none where
    each query head has keys of its own: there the newer one is faster even so."""
    report = PassReport("attention_ragged")
    graph = model.graph
    for node in [n for n in graph if n.op_type == "GroupQueryAttention"]:
        query = node.inputs[0]
        assert query is not None
        if query.dtype != ir.DataType.FLOAT or float(node.attributes["softcap"].value) or head_sink(node) is not None:
            continue
        heads, kv_heads = (int(node.attributes[name].value) for name in ("num_heads", "kv_num_heads"))
        if heads == kv_heads:
            continue
        sinks = array_initializer(graph, f"ragged.sinks_{heads}", np.full(heads, _WEIGHTLESS, np.float32))
        set_head_sink(node, sinks)
        report.applied += 1
    return report
