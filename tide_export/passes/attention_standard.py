"""Lower ``tide::Attention`` to ONNX opset 24: TensorScatter, in place, and Attention over the whole cache.

    cache  : the new keys and values written at write_index                     TensorScatter
    output = attention over the first write_index + S slots                     Attention, nonpad_kv_seqlen, is_causal

With ``nonpad_kv_seqlen`` causality counts from the end of the valid slots, so token s of sequence b sees the slots
``<= write_index[b] + s`` (https://onnx.ai/onnx/operators/onnx__Attention.html). A window shorter than the cache becomes a mask in
place of ``is_causal``. An attention with a soft-cap, which TensorRT's Attention rejects, or with sinks, which the operator lacks,
is decomposed (`attention_products`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape

from tide_export.passes.attention_products import attention_products
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import new_value, sinks_of
from tide_export.passes.visible_slots import token_count, visible_slots


@dataclass
class _Shared:
    """Values that the attentions of one graph share: valid lengths [B], and visible slots, by window."""

    graph: ir.Graph
    slots: int
    tape: Tape = field(default_factory=Tape)
    valid: ir.Value | None = None
    visible: dict[int, ir.Value] = field(default_factory=dict)

    def lengths(self) -> ir.Value:
        if self.valid is None:
            write_index = next(value for value in self.graph.inputs if value.name == "write_index")
            self.valid = self.tape.op("Add", [write_index, token_count(self.graph, self.tape)])
        return self.valid

    def mask(self, window: int) -> ir.Value:
        if window not in self.visible:
            self.visible[window] = visible_slots(self.graph, self.tape, self.slots, window)
        return self.visible[window]


def lower_attention_standard(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("attention_standard")
    graph = model.graph
    shared = _Shared(graph, context.max_seq_len)
    for node in [n for n in graph if n.domain == "tide" and n.op_type == "Attention"]:
        if node.attributes["softcap"].value:
            report.skip(node.outputs[1].name, "it has a soft-cap, which the operator refuses on GPUs (decomposed instead)")
        elif sinks_of(node) is not None:
            report.skip(node.outputs[1].name, "it has sinks, which the operator lacks (decomposed instead)")
        _lower(shared, node)
        report.applied += 1
    if not report.applied:
        return report
    graph.insert_before(graph[0], shared.tape.nodes)
    model.opset_imports.pop("tide", None)
    common.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        if value.name in ("position_ids", "write_index") and not value.uses():
            graph.inputs.remove(value)
    return report


def _lower(shared: _Shared, node: ir.Node) -> None:
    query, key, value, key_cache, value_cache, write_index = node.inputs[:6]
    sinks = sinks_of(node)
    tape = Tape()
    caches = []
    for new, cache, old in ((key, key_cache, node.outputs[1]), (value, value_cache, node.outputs[2])):
        made = new_value(old.name, old, old.shape)
        caches.append(tape.op("TensorScatter", [cache, new, write_index], {"axis": 2}, output=made))
    scale, softcap = float(node.attributes["scale"].value), float(node.attributes["softcap"].value)
    window = int(node.attributes["window"].value)
    window = window if 0 < window < shared.slots else 0
    if softcap or sinks is not None:
        output = attention_products(shared.graph, tape, query, caches[0], caches[1], shared.mask(window), scale, softcap, sinks)
    else:
        mask = shared.mask(window) if window else None
        attributes = {"is_causal": int(not window), "scale": scale}
        output = tape.op("Attention", [query, *caches, mask, None, None, shared.lengths()], attributes)
    output = tape.op("Transpose", [output], {"perm": [0, 2, 1, 3]})
    shared.graph.insert_before(node, tape.nodes)
    for old, made in zip(node.outputs, (output, *caches), strict=True):
        made.type, made.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, made, replace_graph_outputs=True)
    shared.graph.remove(node, safe=True)
