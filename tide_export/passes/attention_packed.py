"""What both forms of attention for several sequences in one step share: operands between packed tokens and padded sequences.

The batch may be ragged: matrix products run on the step's T tokens, packed to [1, T, H] sequence after sequence; only attention
and its copies also process padding. Besides the contract's inputs the runtime fills:

    padded_from [B, S]            index into the T tokens; sequences with fewer than S tokens repeat one of theirs
    packed_from [T]               index of each token in the padded [B · S]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape

from tide_export.passes.graph_walk import array_initializer, dims, rename_dims


class Named(Protocol):
    """An input or output of a graph."""

    @property
    def name(self) -> str | None: ...


def is_kept(value: Named) -> bool:
    """Whether a layer keeps it: a cache of keys or values, or a state."""
    return "_cache_" in (value.name or "") or (value.name or "").startswith("state_")


@dataclass(frozen=True)
class Heads:
    """Head counts and head dimensions of one attention."""

    query: int
    kv: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """G, the query heads that share a KV head."""
        return self.query // self.kv


@dataclass
class PackedAttention:
    """One attention being rewritten. ``shared``: values that several attentions of the graph read, by what they depend on."""

    graph: ir.Graph
    node: ir.Node
    heads: Heads
    shared: dict[object, ir.Value]
    tape: Tape = field(default_factory=Tape)

    def attribute(self, name: str) -> Any:
        return self.node.attributes[name].value

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        return array_initializer(self.graph, f"batched.{value}_{dtype.name}", np.array(value, dtype.numpy()))

    def reshape(self, value: ir.Value, *target: int) -> ir.Value:
        name = "batched.reshape_" + "x".join(map(str, target))
        return self.tape.op("Reshape", [value, array_initializer(self.graph, name, np.array(target, np.int64))])

    def split(self, value: ir.Value, *sizes: int) -> list[ir.Value]:
        name = "batched.split_" + "_".join(map(str, sizes))
        parts = array_initializer(self.graph, name, np.array(sizes, np.int64))
        return list(self.tape.op_multi_out("Split", [value, parts], {"axis": -1}, num_outputs=len(sizes)))


def packed_attentions(model: ir.Model) -> list[PackedAttention]:
    """The model's attentions, to be rewritten in order. The graph's values become packed, [1, T, …], if there is one."""
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if nodes:
        rename_packed_dims(model.graph)
    shared: dict[object, ir.Value] = {}
    return [PackedAttention(model.graph, node, _heads(node), shared) for node in nodes]


def _heads(node: ir.Node) -> Heads:
    key_cache, value_cache = node.inputs[3:5]
    return Heads(node.attributes["num_heads"].value, dims(key_cache)[1], dims(key_cache)[3], dims(value_cache)[3])


def rename_packed_dims(graph: ir.Graph) -> None:
    """Rename [B, S] to [1, T] in every value except caches, states, and the inputs that index them."""
    unchanged = {"write_index", "seqlens_k", *(v.name for v in (*graph.inputs, *graph.outputs) if is_kept(v))}
    batch, seq = next(v for v in graph.inputs if v.name in ("input_ids", "hidden")).shape[:2]
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    rename_dims((v for v in values if v.name not in unchanged), {batch: 1, seq: "tokens"})


def remove_unused(model: ir.Model) -> None:
    common.RemoveUnusedNodesPass()(model)
    for value in list(model.graph.inputs):
        if not value.uses():
            model.graph.inputs.remove(value)


def padded(attention: PackedAttention, value: ir.Value, width: int) -> ir.Value:
    """[1, T, width] as [B, S, width]."""
    source = graph_input(attention, "padded_from", ir.DataType.INT64, "batch", "padded")
    return attention.tape.op("Gather", [attention.reshape(value, -1, width), source], {"axis": 0})


def gathered(attention: PackedAttention, value: ir.Value, width: int) -> ir.Value:
    """The step's tokens [1, T, width] of padded ones [B, S, …]."""
    source = graph_input(attention, "packed_from", ir.DataType.INT64, 1, "tokens")
    return attention.tape.op("Gather", [attention.reshape(value, -1, width), source], {"axis": 0})


def graph_input(attention: PackedAttention, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    """The graph's input ``name``, added if missing."""
    found = next((v for v in attention.graph.inputs if v.name == name), None)
    if found is None:
        found = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        attention.graph.inputs.append(found)
    return found
