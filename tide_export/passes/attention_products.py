"""Attention over a whole cache as batched products, for compilers without an Attention operator or one without soft-cap or sinks.

    scores  = (scale · q) · keysᵀ                                        [B, KV, G·S, slots]
    scores  = softcap · tanh(scores / softcap), where the model has one
    weights = softmax(scores of the visible slots)                       in float32, as the models compute it
    weights = exp(scores) / (Σ exp(scores) + exp(sink)), where the model has a sink for each query head
    output  = weights · values

The G query heads that share a KV head are stacked, [B, KV, G·S, D], so that each KV head takes part in one product and keys are
never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.passes.graph_walk import array_initializer, dims

# The score of invisible slots. -inf would give NaN for a sequence without tokens in this step, which sees no slot.
_UNSEEN = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _Products:
    """The nodes of one attention, recorded on ``tape``."""

    graph: ir.Graph
    tape: Tape
    kv_heads: int
    group: int

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        return array_initializer(self.graph, f"attention.{value}_{dtype.name}", np.array(value, dtype.numpy()))

    def reshape(self, value: ir.Value, *target: int) -> ir.Value:
        name = "attention.reshape_" + "x".join(map(str, target))
        return self.tape.op("Reshape", [value, array_initializer(self.graph, name, np.array(target, np.int64))])

    def cast(self, value: ir.Value, source: ir.DataType, target: ir.DataType) -> ir.Value:
        return value if source == target else self.tape.op("Cast", [value], {"to": target})


def attention_products(
    graph: ir.Graph,
    tape: Tape,
    query: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    visible: ir.Value,
    scale: float,
    softcap: float = 0.0,
    sinks: ir.Value | None = None,
) -> ir.Value:
    """Record the products and return the attention [B, N, S, Dv].

    Args:
        query: [B, N, S, D].
        keys: [B, KV, slots, D], ``slots`` a number; values: [B, KV, slots, Dv].
        visible: [B, 1, S, slots] bool.
        softcap: 0 for none.
        sinks: [N], or none.
    """
    (_, heads, _, _), (_, kv_heads, slots, _) = dims(query), dims(keys)
    products = _Products(graph, tape, kv_heads, heads // kv_heads)
    dtype = keys.dtype
    wide = ir.DataType.FLOAT
    scores = products.cast(_scores(products, query, keys, scale / (softcap or 1.0)), dtype, wide)
    if softcap:
        scores = tape.op("Mul", [tape.op("Tanh", [scores]), products.number(softcap, wide)])
    weights = products.cast(_softmax(products, scores, visible, slots, sinks), wide, dtype)
    return products.reshape(tape.op("MatMul", [weights, values]), 0, heads, -1, dims(values)[3])


def _scores(products: _Products, query: ir.Value, keys: ir.Value, scale: float) -> ir.Value:
    """[B, KV, G·S, slots]. The query is scaled before the product, because unscaled sums may overflow fp16."""
    scaled = products.tape.op("Mul", [query, products.number(scale, keys.dtype)])
    if products.group > 1:
        scaled = products.reshape(scaled, 0, products.kv_heads, -1, dims(keys)[3])
    return products.tape.op("MatMul", [scaled, products.tape.op("Transpose", [keys], {"perm": [0, 1, 3, 2]})])


def _softmax(products: _Products, scores: ir.Value, visible: ir.Value, slots: int, sinks: ir.Value | None) -> ir.Value:
    """[B, KV, G·S, slots] float32."""
    tape = products.tape
    kv_heads = products.kv_heads
    group = products.group
    if group > 1:
        scores = products.reshape(scores, 0, kv_heads, group, -1, slots)
        between_heads = array_initializer(products.graph, "attention.third", np.array([2], np.int64))
        visible = tape.op("Unsqueeze", [visible, between_heads])
    seen = tape.op("Where", [visible, scores, products.number(_UNSEEN, ir.DataType.FLOAT)])
    if sinks is None:
        weights = tape.op("Softmax", [seen], {"axis": -1})
    else:
        by_head = products.reshape(sinks, kv_heads, group, 1, 1) if group > 1 else products.reshape(sinks, kv_heads, 1, 1)
        weights = softmax_with_sinks(products.graph, tape, seen, by_head)
    return products.reshape(weights, 0, kv_heads, -1, slots) if group > 1 else weights


def softmax_with_sinks(graph: ir.Graph, tape: Tape, scores: ir.Value, sinks: ir.Value) -> ir.Value:
    """Softmax over the last axis of float32 ``scores``, with the logits ``sinks`` in its denominator; shapes broadcast."""
    last = array_initializer(graph, "attention.last", np.array([-1], np.int64))
    sinks = tape.op("Cast", [sinks], {"to": ir.DataType.FLOAT})
    largest = tape.op("Max", [tape.op("ReduceMax", [scores, last]), sinks])
    powers = tape.op("Exp", [tape.op("Sub", [scores, largest])])
    rest = tape.op("Exp", [tape.op("Sub", [sinks, largest])])
    return tape.op("Div", [powers, tape.op("Add", [tape.op("ReduceSum", [powers, last]), rest])])


def visible_slots(graph: ir.Graph, tape: Tape, slots: int, window: int) -> ir.Value:
    """The mask of the cache slots that a token sees, for attention kernels without sliding window or causal mask.

    [B, 1, S, slots] bool: token s of sequence b sees slot j when end - window <= j < end, with end = write_index[b] + s + 1.
    For ``slot < end`` TensorRT-RTX 1.7 also compiles a map of the cache tiles to skip, as for its own causal mask, so that
    attention costs time in the valid slots. For ``slot <= place`` it fuses the mask elsewhere and reads all slots.

    Args:
        window: in tokens; 0 for full causal attention.
    """

    def integers(name: str, numbers: int | list[int]) -> ir.Value:
        return array_initializer(graph, f"visible.{name}", np.array(numbers, np.int64))

    inputs = {value.name: value for value in graph.inputs}
    count = tape.op("Squeeze", [token_count(graph, tape), integers("first", [0])])
    steps = tape.op("Range", [integers("1", 1), tape.op("Add", [count, integers("1", 1)]), integers("1", 1)])
    end = tape.op("Add", [tape.op("Unsqueeze", [inputs["write_index"], integers("second", [1])]), steps])
    end = tape.op("Unsqueeze", [end, integers("around", [1, 3])])
    every = integers("every_slot", list(range(slots)))
    visible = tape.op("Less", [every, end])
    if window:
        oldest = tape.op("Sub", [end, integers(f"window_{window}", window)])
        visible = tape.op("And", [visible, tape.op("GreaterOrEqual", [every, oldest])])
    return visible


def token_count(graph: ir.Graph, tape: Tape) -> ir.Value:
    """[1]: S, the tokens per sequence in this step."""
    states = next(value for value in graph.inputs if value.name in ("hidden", "input_ids"))
    return tape.op("Shape", [states], {"start": 1, "end": 2})


@dataclass
class WholeCaches:
    """What the attentions of one graph over caches of ``slots`` share: nodes on ``tape``, and visible slots by window."""

    graph: ir.Graph
    slots: int
    tape: Tape = field(default_factory=Tape)
    visible: dict[int, ir.Value] = field(default_factory=dict)

    def visible_slots(self, node: ir.Node) -> ir.Value:
        """Those of a ``tide::Attention``, see `visible_slots`."""
        window = int(node.attributes["window"].value)
        window = window if 0 < window < self.slots else 0
        if window not in self.visible:
            self.visible[window] = visible_slots(self.graph, self.tape, self.slots, window)
        return self.visible[window]

    def replace(self, node: ir.Node, tape: Tape, output: ir.Value, *caches: ir.Value) -> None:
        """Put the nodes on ``tape`` in the place of a ``tide::Attention``: ``output`` [B, N, S, D] and the written caches."""
        made = [tape.op("Transpose", [output], {"perm": [0, 2, 1, 3]}), *caches]
        self.graph.insert_before(node, tape.nodes)
        for old, new in zip(node.outputs, made, strict=True):
            new.type, new.shape = old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
