"""Decompose attention and its cache update into opset-20 operators, for compilers without either: TensorRT before 10.14.

    slot   = write_index + s                                                                [B, S], once per graph
    cache  : row (b · KV + head) · Smax + slot of [B·KV·Smax, D] becomes the new key        ScatterND
    output = attention over all slots, of which token s sees j <= slot (and j > slot - window)      attention_products

Attention reads all slots of the cache, because the compiler needs static shapes. The caller keeps ``write_index + S <= Smax``, as
for TensorScatter.

The cache is a graph input and its update a graph output. ScatterND does not write in place, so TensorRT copies the cache once per
step and both need memory of their own: the runtime feeds the output of one step as the input of the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape

from tide_export.passes.attention_products import WholeCaches, attention_products, token_count
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, dims, new_value, sinks_of


@dataclass
class _Shared(WholeCaches):
    """Cache rows to write, by KV heads, are shared as well."""

    rows: dict[int, ir.Value] = field(default_factory=dict)

    def integers(self, name: str, *numbers: int) -> ir.Value:
        return array_initializer(self.graph, f"rows.{name}", np.array(numbers, np.int64))

    def number(self, value: int) -> ir.Value:
        return array_initializer(self.graph, f"rows.{value}", np.array(value, np.int64))

    def count(self, limit: ir.Value) -> ir.Value:
        """0, 1, … up to ``limit`` [1]."""
        scalar = self.tape.op("Squeeze", [limit, self.integers("first", 0)])
        return self.tape.op("Range", [self.number(0), scalar, self.number(1)])

    def rows_to_write(self, heads: int) -> ir.Value:
        """[B, KV, S, 1]: the index of each new key in the cache as a matrix of B · KV · slots rows."""
        if heads not in self.rows:
            tape = self.tape
            write_index = next(v for v in self.graph.inputs if v.name == "write_index")
            blocks = tape.op("Mul", [tape.op("Shape", [write_index]), self.integers(f"{heads}_heads", heads)])
            starts = tape.op("Mul", [self.count(blocks), self.integers("slots", self.slots)])
            starts = tape.op("Reshape", [starts, self.integers(f"by_{heads}_heads", -1, heads, 1)])
            first = tape.op("Unsqueeze", [write_index, self.integers("behind", 1, 2)])
            slot = tape.op("Add", [first, self.count(token_count(self.graph, tape))])
            self.rows[heads] = tape.op("Unsqueeze", [tape.op("Add", [starts, slot]), self.integers("last", 3)])
        return self.rows[heads]


def lower_attention_primitives(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("attention_primitives")
    graph = model.graph
    shared = _Shared(graph, context.max_seq_len)
    for node in [n for n in graph if n.domain == "tide" and n.op_type == "Attention"]:
        _lower(shared, node)
        report.applied += 1
    if report.applied:
        graph.insert_before(graph[0], shared.tape.nodes)
        model.opset_imports.pop("tide", None)
        common.RemoveUnusedNodesPass()(model)
    return report


def _lower(shared: _Shared, node: ir.Node) -> None:
    query, key, value, key_cache, value_cache = node.inputs[:5]
    scale, softcap = (float(node.attributes[name].value) for name in ("scale", "softcap"))
    tape = Tape()
    keys = _updated(shared, tape, key_cache, key, node.outputs[1])
    values = _updated(shared, tape, value_cache, value, node.outputs[2])
    visible = shared.visible_slots(node)
    output = attention_products(shared.graph, tape, query, keys, values, visible, scale, softcap, sinks_of(node))
    shared.replace(node, tape, output, keys, values)


def _updated(shared: _Shared, tape: Tape, cache: ir.Value, new: ir.Value, old: ir.Value) -> ir.Value:
    """The cache [B, KV, slots, D] with ``new`` [B, KV, S, D] written into it; the result takes the name of ``old``."""
    _, heads, _, width = dims(cache)
    flat = tape.op("Reshape", [cache, shared.integers(f"flat_{width}", -1, width)])
    written = tape.op("ScatterND", [flat, shared.rows_to_write(heads), new])
    shape = shared.integers(f"cache_{heads}x{width}", -1, heads, shared.slots, width)
    return tape.op("Reshape", [written, shape], output=new_value(old.name, old, old.shape))
