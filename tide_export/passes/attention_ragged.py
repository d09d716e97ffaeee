"""Select GroupQueryAttention's older kernel for decode steps of several sequences with different lengths.

Since 1.29 ONNX Runtime has a kernel for fp32 attention that batches sequences of equal length and computes others one after the
other, parallel over the heads of one sequence (https://github.com/microsoft/onnxruntime/pull/29216). The older one is parallel
over the heads of all sequences. ONNX Runtime still uses it for inputs that the new kernel lacks, such as head sinks: one logit
per head that joins the softmax and has no value. Sinks of weight 0 change no bit of the result: exp(-1e30) = 0.

benchmarks/attention_forms.py measures both. The gain is largest if the number of heads is no multiple of the number of threads:
with 3 heads on two threads a decode step of 8 sequences takes 0.7 to 0.9 times as long (two cores; docs/measured.md).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tide_export.passes.attention_gqa import HEAD_SINK, KEY_SCALE, QUERY_SEQLENS, optional_input, set_input
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer

_WEIGHTLESS = -1e30


def lower_attention_ragged(model: ir.Model, context: LoweringContext) -> PassReport:
    """Skips attentions that already use the older kernel (fp16, soft-cap, sinks of the model), padded ones and those over int8
    caches, and multi-head attention, for which the newer kernel is faster even with different lengths."""
    report = PassReport("attention_ragged")
    graph = model.graph
    for node in [n for n in graph if n.op_type == "GroupQueryAttention"]:
        query = node.inputs[0]
        assert query is not None
        if query.dtype != ir.DataType.FLOAT or float(node.attributes["softcap"].value):
            continue
        if any(optional_input(node, index) is not None for index in (HEAD_SINK, KEY_SCALE, QUERY_SEQLENS)):
            continue
        heads, kv_heads = (int(node.attributes[name].value) for name in ("num_heads", "kv_num_heads"))
        if heads == kv_heads:
            continue
        sinks = array_initializer(graph, f"ragged.sinks_{heads}", np.full(heads, _WEIGHTLESS, np.float32))
        set_input(node, HEAD_SINK, sinks)
        report.applied += 1
    return report
