"""Build the graph that takes the states of recurrent layers over the tokens of a step that are kept, from those before the step.

    advance   state_i_n [1, …], its operands undo_i_n_… [1, T, …] → state_out_i_n, for every state n of a layer i

After a step with drafts that are rejected a sequence's states hold these too, and cannot be cut as keys and values can. The
operands are those of its accepted tokens, among what the step's graph outputs (`pad_recurrence`). It computes what the step
computes, so the states have the same bits as after a step without the rejected tokens, and it multiplies with no weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.bundle.manifest import ADVANCE

from tide_export.graphs.cut import CutGraph
from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.graph_walk import array_initializer

_END = np.iinfo(np.int64).max


def advance_graph(graphs: Iterable[CutGraph]) -> CutGraph:
    """The graph for the states of lowered segments."""
    segments = [graph.model for graph in graphs if graph.layers is not None]
    states = [value for model in segments for value in model.graph.inputs if (value.name or "").startswith("state_")]
    operands = {
        value.name: value for model in segments for value in model.graph.outputs if (value.name or "").startswith("undo_")
    }
    graph = ir.Graph([], [], nodes=[], opset_imports={"": segments[0].opset_imports[""], MS_DOMAIN: 1}, name=ADVANCE)
    tape = Tape()
    for like in states:
        state = _copied(graph, like)
        state.shape = ir.Shape([1, *like.shape[1:]])
        prefix = re.sub("^state_", "undo_", state.name or "") + "_"
        own = {name.removeprefix(prefix): _copied(graph, value) for name, value in operands.items() if name.startswith(prefix)}
        updated = _convolved(graph, tape, state, **own) if "rows" in own else _recurred(tape, state, **own)
        updated.name = written_name(state.name or "")
        updated.type = state.type
        updated.shape = state.shape
        graph.outputs.append(updated)
    graph.extend(tape.nodes)
    return CutGraph(ADVANCE, ir.Model(graph, ir_version=segments[0].ir_version))


def _copied(graph: ir.Graph, value: ir.Value) -> ir.Value:
    graph.inputs.append(ir.Value(name=value.name, type=value.type, shape=value.shape))
    return graph.inputs[-1]


def _convolved(graph: ir.Graph, tape: Tape, state: ir.Value, rows: ir.Value) -> ir.Value:
    """The last rows of the state and of those that follow it, as many as it has."""
    count = int(state.shape[1])
    begin, end, axis = (array_initializer(graph, f"rows.{n}", np.array([n], np.int64)) for n in (-count, _END, 1))
    return tape.op("Slice", [tape.op("Concat", [state, rows], {"axis": 1}), begin, end, axis])


def _recurred(
    tape: Tape, state: ir.Value, key: ir.Value, value: ir.Value, decay: ir.Value, beta: ir.Value | None = None
) -> ir.Value:
    """The keys stand in for the queries, whose output is not read."""
    _, heads, width, _ = state.shape
    attributes = {
        "update_rule": "gated" if beta is None else "gated_delta",
        "q_num_heads": int(key.shape[2]) // int(width),
        "kv_num_heads": int(heads),
    }
    gates = [gate for gate in (decay, beta) if gate is not None]
    inputs = [key, key, value, state, *gates]
    return tape.op_multi_out("LinearAttention", inputs, attributes, num_outputs=2, domain=MS_DOMAIN)[1]
