"""Replace GroupQueryAttention by batched products where prompt tokens are cached in another order than the text's.

An early-exit prefill caches the tokens of a chunk that stop first before those that go on. GroupQueryAttention attends to the
slots up to a token's own; the batched form (`lower_attention_batched`) reads a mask that the runtime fills by positions.
"""

from __future__ import annotations

import onnx_ir as ir

from tide_export.passes.attention_batched import lower_attention_batched
from tide_export.passes.attention_gqa import KEY_SCALE, optional_input
from tide_export.passes.base import LoweringContext, PassReport


def lower_attention_scattered(model: ir.Model, context: LoweringContext) -> PassReport:
    """Applies to all attentions or none: decoding computes sliding windows by slots, and the products cannot read int8 caches."""
    report = PassReport("attention_scattered")
    for node in [n for n in model.graph if n.op_type == "GroupQueryAttention"]:
        if node.attributes["local_window_size"].value > 0:
            report.skip(node.outputs[1].name, "its sliding window goes by the order of the cache")
        elif optional_input(node, KEY_SCALE) is not None:
            report.skip(node.outputs[1].name, "its caches are int8")
    if not report.skipped:
        report.applied = lower_attention_batched(model, context).applied
    return report
