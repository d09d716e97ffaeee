"""One loop of a looped model as one graph, whose tokens are at any of its loops: they use the same weights.

    loop    input_ids, hidden, first_loop, position_ids, write_index, logits_index, key_cache_i, value_cache_i …
            → logits, token, hidden_out, key_cache_out_i, …

A token where ``first_loop`` [B, S, 1] is true begins with the embedding of its id, others with what the model makes of
``hidden``, the state behind the last layer of the loop before. ``hidden_out`` is that of this loop; ``logits`` are the head's of
the tokens at ``logits_index``. Cache i is layer i's of the loop that a row is in: a sequence has a row for each loop.
"""

from __future__ import annotations

import re

import onnx_ir as ir
from onnx_ir.tape import Tape
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.bundle.manifest import LOOP
from tide_runtime.errors import UnsupportedModelError

from tide_export.graphs.cut import CutGraph, boundary_nodes, finish_piece, keep_boundaries, loop_starts, select_logits_tokens
from tide_export.trace.trace_model import TracedModel


def cut_loop(traced: TracedModel) -> CutGraph:
    """The graph, cut from the last loop of a prepared model.

    Raises UnsupportedModelError where a loop needs more than the state before it.
    """
    layers = traced.num_layers // (1 + len(loop_starts(traced.model.graph)))
    last = traced.num_layers - layers
    model = keep_boundaries(traced, [0, last], starts=True)
    graph = model.graph
    boundaries = boundary_nodes(graph)
    start = loop_starts(graph)[-1]
    before = boundaries[last].outputs[0]
    after = boundaries[traced.num_layers].inputs[0]
    assert before.shape is not None and after is not None
    first = ir.val("first_loop", dtype=ir.DataType.BOOL, shape=ir.Shape([*before.shape[:2], 1]))
    graph.inputs.append(first)
    tape = Tape()
    begun = tape.op("Where", [first, boundaries[0].inputs[0], start.inputs[0]])
    begun.type, begun.shape = before.type, before.shape
    graph.insert_before(start, tape.nodes)
    ir.convenience.replace_all_uses_with(start.outputs[0], begun)
    graph.remove(start, safe=True)
    select_logits_tokens(graph, boundaries[traced.num_layers])
    values = {value.name or "": value for value in (*graph.inputs, *graph.outputs)}
    kept = {name: int(name.rpartition("_")[2]) for name in values if re.fullmatch(r"(key|value)_cache_\d+", name)}
    own = [name for name, layer in kept.items() if layer >= last]
    inputs = [values[name] for name in ("input_ids", "position_ids", "write_index", "logits_index", *own)]
    outputs = [values["logits"], after, *(values[written_name(name)] for name in own)]
    try:
        piece = ir.convenience.extract(graph, [before, first, *inputs], outputs)
    except ValueError as error:
        raise UnsupportedModelError(
            f"one loop cannot be cut out of the model ({error}): models whose later loops read more than the state before them "
            "are not supported"
        ) from error
    piece.outputs[1].name = "hidden_out"
    for given, written, name in zip(piece.inputs[-len(own) :], piece.outputs[2:], own, strict=True):
        given.name = f"{name.rpartition('_')[0]}_{kept[name] - last}"
        written.name = written_name(given.name)
    cut = ir.Model(piece, ir_version=model.ir_version)
    finish_piece(cut, LOOP, from_hidden=True, logits=True)
    return CutGraph(LOOP, cut, (0, layers))
