"""Build the graph of the draft head, which guesses tokens from the model's final state (tide_calibrate.draft_head trains it).

    draft   input_ids [1, T], before [1, T, 2H] → states [1, T, 2H], token [1, T] int64, score [1, T] float32

    x      = fuse · [embedding(input_ids); rmsnorm(middle); rmsnorm(final)],   [middle; final] = before
    y      = x + down · (silu(gate · n) * (up · n)),   n = rmsnorm(x)
    token  = vocabulary[argmax l], score = max softmax(l),   l = rows · rmsnorm(y);   states = [y; y]

``before``: the states after the middle and the last layer of the token before ``input_ids``, or ``states`` of the guess before.
Norms have no weights: training folds them into the matrices. The embedding is the model's own, with all that its code does before
layer 0.
Matrices have 8 bits, whatever the model's have: a wrong draft costs time, never a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from tide_runtime.bundle.manifest import DRAFT, STATES
from tide_runtime.errors import UnsupportedModelError

from tide_export.cut import CutGraph, boundary_nodes, sort_initializers
from tide_export.exit_graphs import RMS_EPSILON
from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.quantized_matmul import ACCURACY_LEVEL
from tide_export.quantization.quantized_weight import QuantizedWeight, symmetric_int8
from tide_export.router_function import cast, rms_norm
from tide_export.trace import TracedModel

DraftTensors = Mapping[str, NDArray[np.generic]]
_BLOCK = 32


@dataclass(frozen=True)
class DraftWeights:
    """A trained draft head, which reads the states after ``layer`` and after all layers; ``tensors``: see `draft_graph_model`."""

    layer: int
    tensors: DraftTensors


def draft_graph_model(traced: TracedModel, tensors: DraftTensors) -> CutGraph:
    """The graph, with the embedding cut from a copy of the prepared model.

    ``tensors``: fuse [H, 3H], gate_up [2I, H], down [H, I] and rows [N, H] float32, vocabulary [N] int64.
    Raises UnsupportedModelError if the state before layer 0 needs more than token ids and positions.
    """
    model = traced.model.clone()
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    embedded = boundary_nodes(graph)[0].inputs[0]
    assert embedded is not None
    try:
        piece = ir.convenience.extract(graph, [inputs["input_ids"], inputs["position_ids"]], [embedded])
    except ValueError as error:
        raise UnsupportedModelError(f"the embedding cannot be cut out of the model for the draft head ({error})") from error
    _append_head(piece, tensors)
    piece.name = DRAFT
    piece_model = ir.Model(piece, ir_version=model.ir_version)
    piece_model.opset_imports[MS_DOMAIN] = 1
    common.RemoveUnusedNodesPass()(piece_model)
    common.ClearMetadataAndDocStringPass()(piece_model)
    sort_initializers(piece)
    return CutGraph(DRAFT, piece_model)


def _append_head(graph: ir.Graph, tensors: DraftTensors) -> None:
    embedded = graph.outputs[0]
    hidden_size = tensors["fuse"].shape[0]
    dtype = embedded.dtype or ir.DataType.FLOAT
    tokens = (1, "seq")
    before = ir.val("before", dtype=dtype, shape=(*tokens, 2 * hidden_size))
    head = _DraftTape(tensors)
    tape = head.tape
    wide = [cast(tape, value, ir.DataType.FLOAT) for value in (embedded, before)]
    middle, final = tape.op_multi_out("Split", [wide[1]], {"axis": -1, "num_outputs": 2}, num_outputs=2)
    x = head.product("fuse", tape.op("Concat", [wide[0], head.normed(middle), head.normed(final)], {"axis": -1}))
    gate, up = tape.op_multi_out(
        "Split", [head.product("gate_up", head.normed(x))], {"axis": -1, "num_outputs": 2}, num_outputs=2
    )
    gated = tape.op("Mul", [tape.op("Mul", [gate, tape.op("Sigmoid", [gate])]), up])
    own = tape.op("Add", [x, head.product("down", gated)])
    own.dtype = ir.DataType.FLOAT
    logits = head.product("rows", head.normed(own))
    likeliest = tape.op("ArgMax", [logits], {"axis": -1, "keepdims": 0})
    token = tape.op("Gather", [head.constant("vocabulary"), likeliest], {"axis": 0})
    axes = tape.initializer(ir.tensor(np.array([-1], np.int64), name="draft.axes"))
    score = tape.op("ReduceMax", [tape.op("Softmax", [logits], {"axis": -1}), axes], {"keepdims": 0})
    narrow = cast(tape, own, dtype)
    states = tape.op("Concat", [narrow, narrow], {"axis": -1})
    graph.extend(tape.nodes)
    for value in tape.initializers:
        graph.register_initializer(value)
    graph.inputs.append(before)
    del graph.outputs[:]
    for value, name, kind, shape in (
        (states, STATES, dtype, (*tokens, 2 * hidden_size)),
        (token, "token", ir.DataType.INT64, tokens),
        (score, "score", ir.DataType.FLOAT, tokens),
    ):
        value.name, value.dtype, value.shape = name, kind, ir.Shape(shape)
        graph.outputs.append(value)


class _DraftTape:
    """The head's nodes and initializers."""

    def __init__(self, tensors: DraftTensors) -> None:
        self.tape, self.tensors = Tape(), tensors
        ones = np.ones(tensors["fuse"].shape[0], np.float32)
        self._ones = self.tape.initializer(ir.tensor(ones, name="draft.ones"))

    def normed(self, states: ir.Value) -> ir.Value:
        return rms_norm(self.tape, states, self._ones, RMS_EPSILON)

    def constant(self, name: str) -> ir.Value:
        return self.tape.initializer(ir.tensor(np.ascontiguousarray(self.tensors[name]), name=f"draft.{name}"))

    def product(self, name: str, states: ir.Value) -> ir.Value:
        """``states`` times the transposed matrix ``name``, in 8 bits where its rows are whole blocks."""
        matrix = np.asarray(self.tensors[name], np.float32)
        if matrix.shape[1] % _BLOCK:
            transposed = ir.tensor(np.ascontiguousarray(matrix.T), name=f"draft.{name}.T")
            return self.tape.op("MatMul", [states, self.tape.initializer(transposed)])
        return self._low_bit(name, states, symmetric_int8(matrix, _BLOCK))

    def _low_bit(self, name: str, states: ir.Value, weight: QuantizedWeight) -> ir.Value:
        values = self.tape.initializer(ir.tensor(weight.packed_values(), name=f"draft.{name}.values"))
        scales = self.tape.initializer(ir.tensor(weight.scales, name=f"draft.{name}.scales"))
        attributes = {"K": weight.shape[1], "N": weight.shape[0], "bits": 8, "block_size": _BLOCK}
        attributes["accuracy_level"] = ACCURACY_LEVEL
        return self.tape.op("MatMulNBits", [states, values, scales], attributes, domain=MS_DOMAIN)
