"""Lower ``tide::Attention`` to ONNX opset 24: TensorScatter, in place, and Attention over the whole cache under a mask.

    cache  : the new keys and values written at write_index                                    TensorScatter
    output = attention over the slots that a token sees: its own and those before it           Attention, attn_mask

The operator's ``nonpad_kv_seqlen`` with ``is_causal`` says the same (https://onnx.ai/onnx/operators/onnx__Attention.html), but
TensorRT-RTX 1.7's parser drops them. Its network API has both, yet causality from the lower right subtracts S from the lengths,
and engines copy S from host memory in every run; the bodies of CUDA graphs' conditions take copies of device and pinned memory
alone (CUDA Programming Guide, Conditional Node Body Graph Requirements). Masks compile without a copy. An attention with a
soft-cap, which TensorRT's Attention rejects, or with sinks, which the operator lacks, is decomposed (`attention_products`).
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape

from tide_export.passes.attention_products import WholeCaches, attention_products
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import new_value, sinks_of


def lower_attention_standard(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("attention_standard")
    graph = model.graph
    shared = WholeCaches(graph, context.max_seq_len)
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


def _lower(shared: WholeCaches, node: ir.Node) -> None:
    query, key, value, key_cache, value_cache, write_index = node.inputs[:6]
    sinks = sinks_of(node)
    tape = Tape()
    caches = []
    for new, cache, old in ((key, key_cache, node.outputs[1]), (value, value_cache, node.outputs[2])):
        made = new_value(old.name, old, old.shape)
        caches.append(tape.op("TensorScatter", [cache, new, write_index], {"axis": 2}, output=made))
    scale, softcap = float(node.attributes["scale"].value), float(node.attributes["softcap"].value)
    mask = shared.visible_slots(node)
    if softcap or sinks is not None:
        output = attention_products(shared.graph, tape, query, caches[0], caches[1], mask, scale, softcap, sinks)
    else:
        output = tape.op("Attention", [query, *caches, mask], {"scale": scale})
    shared.replace(node, tape, output, *caches)
