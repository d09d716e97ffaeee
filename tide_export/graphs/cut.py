"""Cut a traced model at its boundaries into segments and a head: each one ONNX graph with the contract's names.

    segment_0     input_ids, position_ids, write_index, key_cache_i, value_cache_i … → hidden_out, key_cache_out_i, …
    segment_n     hidden, position_ids, write_index, key_cache_i, value_cache_i … → hidden_out, key_cache_out_i, …
                  and for every state n of a layer i that keeps some, state_i_n → state_out_i_n
    last segment  …, logits_index → logits, token (the argmax), key_cache_out_i, …
    head          hidden → logits, token: for early exits

The embedding is part of the first segment and the LM head part of the last, because a full-depth step runs both anyway and a
launch costs as much as half a small layer. ``logits_index`` [N] indexes the tokens of the step, counted over all sequences, whose
logits are needed; other prompt tokens skip the LM head. Cache indices are the model's layer numbers. Boundaries without a cut are
removed; without checkpoints the only segment is the whole model. The graph of all layers may also output ``states``, which a
draft head reads (`TappedStates`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.bundle.manifest import STATES
from tide_runtime.errors import UnsupportedModelError

from tide_export.passes.base import PassReport
from tide_export.passes.graph_walk import array_initializer, new_value, rename_dims, splice
from tide_export.trace.trace_model import TracedModel, kept_names


@dataclass(frozen=True)
class CutGraph:
    """One graph of the bundle. ``layers`` = (first, end) of the layers it holds, None for the head."""

    name: str
    model: ir.Model
    layers: tuple[int, int] | None = None


@dataclass(frozen=True)
class LoweredModel:
    """A target's graphs, ready to write, and the reports of its passes. ``forms``: batched, uncut and advance graphs.

    ``draft``: the draft head's graph, if there is one.
    """

    graphs: list[CutGraph]
    forms: list[CutGraph]
    reports: list[PassReport]
    draft: CutGraph | None = None

    @property
    def applied(self) -> dict[str, int]:
        """Pass name → how often it applied, over all graphs."""
        counts: Counter[str] = Counter()
        for report in self.reports:
            counts[report.name] += report.applied
        return dict(counts)


def name_values(traced: TracedModel) -> None:
    """Give the traced graph the contract's names, and read batch and sequence sizes from ``position_ids``."""
    graph = traced.model.graph
    inputs = list(graph.inputs)
    kept = [numbered(name, number) for number, layer in enumerate(traced.layers) for name in kept_names(layer)]
    for value, name in zip(inputs, ["position_ids", "input_ids", "write_index", *kept], strict=True):
        value.name = name
    for value, name in zip(graph.outputs, ["logits", *map(written_name, kept)], strict=True):
        value.name = name
    positions = graph.inputs[0]
    for node in graph:
        if node.op_type == "Shape" and node.inputs[0] in inputs:
            _redirect_shape(node, positions)


def numbered(name: str, layer: int) -> str:
    """The graph input for what layer number ``layer`` keeps under ``name``: ``key_cache_3``, ``state_3_0``."""
    kind, _, number = name.partition("state_")
    return f"state_{layer}_{number}" if number else f"{kind}_{layer}"


def _redirect_shape(node: ir.Node, positions: ir.Value) -> None:
    source = node.inputs[0]
    assert source is not None
    start = node.attributes["start"].value if "start" in node.attributes else 0
    end = node.attributes["end"].value if "end" in node.attributes else None
    if source.name == "input_ids" or (start == 0 and end == 1):  # every input starts with the batch dimension
        node.replace_input_with(0, positions)


def boundary_nodes(graph: ir.Graph) -> dict[int, ir.Node]:
    return {int(n.attributes["index"].value): n for n in graph if n.op_type == "Boundary"}


def loop_starts(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that mark what the first layer reads in the second loop, and those after it."""
    return [node for node in graph if node.op_type == "LoopStart"]


@dataclass(frozen=True)
class TappedStates:
    """What the graph of all layers outputs of its tokens for a draft head: ``states`` [1, T, D], or [1, N, D].

    Args:
        taps: marked boundaries, and the one after the last layer, whose states [1, T, H] are joined.
        fuse: a graph from these, ``tapped`` [1, T, len(taps) · H], to ``states``.
        all_tokens: of all tokens T of the step; otherwise of the N with logits.
    """

    taps: Sequence[int]
    fuse: ir.Model
    all_tokens: bool


def keep_boundaries(traced: TracedModel, cuts: Iterable[int], marks: Iterable[int] = (), starts: bool = False) -> ir.Model:
    """A copy of the traced model that keeps the boundaries at ``cuts`` and the one after the last layer; of the others, Identity
    nodes take the place of those at ``marks``. ``starts``: it keeps `loop_starts`, too."""
    model = traced.model.clone()
    kept = {traced.num_layers, *cuts}
    marked = {*marks}
    if not starts:
        _drop(model.graph, loop_starts(model.graph))
    for index, node in boundary_nodes(model.graph).items():
        if index in kept:
            continue
        state = node.inputs[0]
        if index in marked:
            output = new_value(marked_boundary(index), node.outputs[0], node.outputs[0].shape)
            mark = ir.node("Identity", [state], outputs=[output])
            model.graph.insert_before(node, mark)
            state = output
        ir.convenience.replace_all_uses_with(node.outputs[0], state)
        model.graph.remove(node, safe=True)
    return model


def _drop(graph: ir.Graph, marks: Iterable[ir.Node]) -> None:
    for node in marks:
        ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        graph.remove(node, safe=True)


def cut(model: ir.Model, num_layers: int, tapped: TappedStates | None = None) -> list[CutGraph]:
    """Cut ``model`` at its remaining boundaries: segment_0 …, head.

    ``tapped``: what the last segment also outputs; for a model that is not cut.
    """
    graph = model.graph
    boundaries = boundary_nodes(graph)
    head = CutGraph("head", _piece(model, "head", boundaries[num_layers].outputs[0], graph.outputs[0], ()))
    select_logits_tokens(graph, boundaries[num_layers])
    states = _tap(model, boundaries[num_layers], tapped) if tapped is not None else None
    graphs = []
    for number, (first, end) in enumerate(itertools.pairwise([0, *sorted(boundaries)])):
        hidden = boundaries[first].outputs[0] if first else None
        result = graph.outputs[0] if end == num_layers else boundaries[end].inputs[0]
        piece = _piece(model, f"segment_{number}", hidden, result, range(first, end), states)
        graphs.append(CutGraph(f"segment_{number}", piece, (first, end)))
    return [*graphs, head]


def select_logits_tokens(graph: ir.Graph, last: ir.Node) -> None:
    """Feed only the tokens at ``logits_index`` into the head: [B, S, H] → [1, N, H]."""
    states = last.inputs[0]
    assert states is not None and states.shape is not None
    graph.inputs.append(ir.val("logits_index", dtype=ir.DataType.INT64, shape=["wanted"]))
    tape = Tape()
    chosen = at_logits_index(graph, tape, states)
    graph.insert_before(last, tape.nodes)
    ir.convenience.replace_all_uses_with(last.outputs[0], chosen)
    rename_dims(dependents(chosen), {states.shape[0]: 1, states.shape[1]: "wanted"})


def at_logits_index(graph: ir.Graph, tape: Tape, states: ir.Value) -> ir.Value:
    index = next(value for value in graph.inputs if value.name == "logits_index")
    assert states.shape is not None
    rows = array_initializer(graph, "logits_index.rows", np.array([-1, states.shape[-1]], np.int64))
    axis = array_initializer(graph, "logits_index.axis", np.array([0], np.int64))
    chosen = tape.op("Unsqueeze", [tape.op("Gather", [tape.op("Reshape", [states, rows]), index], {"axis": 0}), axis])
    chosen.type, chosen.shape = states.type, states.shape
    return chosen


def _tap(model: ir.Model, last: ir.Node, tapped: TappedStates) -> ir.Value:
    """What ``tapped`` describes; ``last``: the boundary after the last layer."""
    graph = model.graph
    tape = Tape()
    marks = {value.name: value for node in graph for value in node.outputs}
    final = last.inputs[0]
    last_layer = int(last.attributes["index"].value)
    states = [final if tap == last_layer else marks[marked_boundary(tap)] for tap in tapped.taps]
    if not tapped.all_tokens:
        states = [at_logits_index(graph, tape, state) for state in states]
    joined = tape.op("Concat", states, {"axis": -1})
    joined.type = final.type
    joined.shape = ir.Shape([*list(final.shape)[:2], len(states) * int(final.shape[-1])])
    graph.extend(tape.nodes)
    [fused] = splice(model, tapped.fuse, "fuse", [joined])
    if not tapped.all_tokens:
        rename_dims((v for state in states for v in dependents(state)), {final.shape[0]: 1, final.shape[1]: "wanted"})
    return fused


def marked_boundary(index: int) -> str:
    """Name of a value that `keep_boundaries` marks."""
    return f"boundary_{index}"


def dependents(value: ir.Value) -> Iterator[ir.Value]:
    """``value`` and all values computed from it."""
    pending = [value]
    seen = set()
    while pending:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            yield current
            pending += [output for node, _ in current.uses() for output in node.outputs]


def _piece(
    model: ir.Model,
    name: str,
    hidden: ir.Value | None,
    result: ir.Value | None,
    layers: Sequence[int],
    states: ir.Value | None = None,
) -> ir.Model:
    graph = model.graph
    assert result is not None
    values = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    inputs = [values["input_ids"]] if hidden is None else [hidden]
    if name != "head":
        inputs.append(values["position_ids"])
    outputs = [result]
    if layers:
        inputs.append(values["write_index"])
    if layers and values["logits"] is result:
        inputs.append(values["logits_index"])
    for layer in layers:
        kept = [name for name in values if re.fullmatch(rf"(key_cache|value_cache|state)_{layer}(_\d+)?", name or "")]
        inputs += [values[name] for name in kept]
        outputs += [values[written_name(name)] for name in kept]
    if states is not None and layers and values["logits"] is result:
        outputs.append(states)
        states.name = STATES
    try:
        piece = ir.convenience.extract(graph, inputs, outputs)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{name} cannot be cut out of the model: it needs more than the hidden state, the positions and its caches "
            f"({error}); models whose later layers read the token ids or earlier layers' states are not supported"
        ) from error
    piece_model = ir.Model(piece, ir_version=model.ir_version)
    finish_piece(piece_model, name, hidden is not None, logits=values["logits"] is result)
    return piece_model


def finish_piece(model: ir.Model, name: str, from_hidden: bool, logits: bool) -> None:
    """Give a piece's first input and output the contract's names, and drop what it does not use."""
    graph = model.graph
    graph.name = name
    if from_hidden:
        graph.inputs[0].name = "hidden"
    if logits:
        graph.outputs[0].name = "logits"
        token = ir.node(
            "ArgMax",
            [graph.outputs[0]],
            attributes={"axis": -1, "keepdims": 0},
            outputs=[new_value("token", None, ir.Shape(list(graph.outputs[0].shape)[:2]))],
        )
        token.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.append(token)
        graph.outputs.append(token.outputs[0])
    else:
        graph.outputs[0].name = "hidden_out"
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    sort_initializers(graph)


def sort_initializers(graph: ir.Graph) -> None:
    """Sort by name, so that the same model gives the same bytes: extract() collects initializers in a set."""
    for initializer in sorted(graph.initializers.values(), key=lambda value: value.name or ""):
        graph.initializers.pop(initializer.name)
        graph.initializers.add(initializer)
