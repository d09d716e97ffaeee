"""Lower ``tide::CausalConv`` and ``tide::Recurrence`` to ONNX Runtime's kernels, for steps of several sequences on target cpu.

Both take padded rows [B, S', …]. In a recurrence, rows of padding are zero: key, value, decay and beta of 0 leave the bits of a
state alone, also where the tokens of another sequence are NaN. Of a convolution the new state is gathered from the old one and
the sequence's own rows. A token's result and the state after it have the same bits whatever shares the launch: LinearAttention
computes one token after the other, and Conv each output by itself.

LinearAttention is 2 to 6 times faster than GatedDeltaNet, which takes packed rows. Conv, which ONNX Runtime turns into a kernel
over blocks of channels, is 5 to 7 times faster than CausalConvWithState: 3.1 ms and not 21 for 256 tokens of 6144 channels.

Input that the runtime fills, besides ``padded_rows`` and ``packed_rows`` of `pad_attention`:

    row_mask [B, S'] float32   1 for a sequence's tokens, 0 for padding; S' is the most tokens of a sequence, or more

For each state a graph outputs the operands of its update, packed rows [1, T, …] in fp32, ``undo_{layer}_{number}_…``: ``rows`` of
a convolution, ``key``, ``value``, ``decay`` and ``beta`` of a recurrence. `advance_graph` takes a state over some of those rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.model.traced_attention import DOMAIN
from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.attention_packed import remove_unused, rename_packed_dims
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, produced_by

CONVOLUTION, RECURRENCE = "CausalConv", "Recurrence"
_STATE = {CONVOLUTION: 2, RECURRENCE: 3}  # operator → index of the marker's input that is the state
_OPERANDS = {CONVOLUTION: {"rows": 0}, RECURRENCE: {"key": 1, "value": 2, "decay": 4, "beta": 5}}


def pad_recurrence(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("pad_recurrence")
    graph = model.graph
    markers = [node for node in graph if node.domain == DOMAIN and node.op_type in _STATE]
    if not markers:
        return report
    rename_packed_dims(graph)
    steps = _StepTape(graph)
    for node in markers:
        for index, value in enumerate(node.inputs):
            node.replace_input_with(index, _unreshaped(value))
        _output_operands(graph, node)
        made = _convolution(steps, node) if node.op_type == CONVOLUTION else _recurrence(steps, node)
        graph.insert_before(node, steps.taken())
        for old, new in zip(node.outputs, made, strict=True):
            name = old.name
            new.type = old.type
            new.shape = old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name = f"{name}.marker"
            new.name = name
        graph.remove(node, safe=True)
        report.applied += 1
    model.opset_imports[MS_DOMAIN] = 1
    model.opset_imports.pop(DOMAIN, None)
    remove_unused(model)
    return report


class _StepTape:
    """Records nodes that map between packed tokens and padded sequences; those that all layers read are made once per graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._tape = Tape()
        self._shared: dict[object, ir.Value] = {}

    def taken(self) -> Sequence[ir.Node]:
        """The nodes that were recorded since the last call."""
        nodes = self._tape.nodes
        self._tape = Tape()
        return nodes

    def op(self, name: str, inputs: Sequence[ir.Value | None], attributes: dict | None = None, domain: str = "") -> ir.Value:
        return self._tape.op(name, inputs, attributes, domain=domain)

    def ops(self, name: str, inputs: Sequence[ir.Value | None], attributes: dict, outputs: int) -> Sequence[ir.Value]:
        return self._tape.op_multi_out(name, inputs, attributes, num_outputs=outputs, domain=MS_DOMAIN)

    def input(self, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
        found = next((value for value in self.graph.inputs if value.name == name), None)
        if found is None:
            found = ir.val(name, dtype=dtype, shape=shape)
            self.graph.inputs.append(found)
        return found

    def numbers(self, *numbers: int) -> ir.Value:
        name = "rows." + "_".join(map(str, numbers))
        return array_initializer(self.graph, name, np.array(numbers, np.int64))

    def padded(self, rows: ir.Value) -> ir.Value:
        """[1, T, C] as [B, S', C]; rows of padding repeat a token."""
        return self.op("GatherND", [rows, self._places])

    def padded_with_zeros(self, rows: ir.Value) -> ir.Value:
        """[1, T, C] as [B, S', C] with zeros in rows of padding. They are gathered: NaN times 0 would be NaN."""
        assert rows.shape is not None
        width = int(rows.shape[-1])
        zeros = array_initializer(self.graph, f"rows.zeros_{width}", np.zeros((1, 1, width), np.float32))
        if "places_or_end" not in self._shared:
            end = self.op("Concat", [self.numbers(0), self.op("Shape", [rows], {"start": 1, "end": 2})], {"axis": 0})
            inside = self.op("Cast", [self.op("Unsqueeze", [self._row_mask, self.numbers(-1)])], {"to": ir.DataType.BOOL})
            self._shared["places_or_end"] = self.op("Where", [inside, self._places, end])
        return self.op("GatherND", [self.op("Concat", [rows, zeros], {"axis": 1}), self._shared["places_or_end"]])

    def packed(self, padded: ir.Value) -> ir.Value:
        """[B, S', C] as [1, T, C]."""
        return self.op("GatherND", [padded, self.input("packed_rows", ir.DataType.INT64, 1, "tokens", 2)])

    def last_rows(self, rows: ir.Value, count: int) -> ir.Value:
        """The last ``count`` of each sequence's rows, of those that follow as many of a state."""
        if count not in self._shared:
            if "counts" not in self._shared:
                total = self.op("ReduceSum", [self._row_mask, self.numbers(1)], {"keepdims": 1})
                self._shared["counts"] = self.op("Cast", [total], {"to": ir.DataType.INT64})
            places = self.op("Add", [self._shared["counts"], self.numbers(*range(count))])
            self._shared[count] = self.op("Unsqueeze", [places, self.numbers(-1)])
        return self.op("GatherND", [rows, self._shared[count]], {"batch_dims": 1})

    @property
    def _places(self) -> ir.Value:
        """The place of each padded row among the packed ones, [B, S', 2]; attention may take more rows of padding."""
        if "places" not in self._shared:
            places = self.input("padded_rows", ir.DataType.INT64, "batch", "padded", 2)
            width = self.op("Shape", [self._row_mask], {"start": 1, "end": 2})
            self._shared["places"] = self.op("Slice", [places, self.numbers(0), width, self.numbers(1)])
        return self._shared["places"]

    @property
    def _row_mask(self) -> ir.Value:
        return self.input("row_mask", ir.DataType.FLOAT, "batch", "rows")


def _output_operands(graph: ir.Graph, node: ir.Node) -> None:
    """Make the operands of a marker's update graph outputs."""
    state = node.inputs[_STATE[node.op_type]]
    assert state is not None and state.name is not None
    for name, index in _OPERANDS[node.op_type].items():
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            named = (value.name or "").endswith("]")  # after a module, see `name_products`
            if named or value.is_graph_output() or value.is_initializer() or value.is_graph_input():
                copy = ir.node("Identity", [value], outputs=[ir.Value(type=value.type, shape=value.shape)])
                graph.insert_before(node, [copy])
                value = copy.outputs[0]
            value.name = f"undo_{state.name.removeprefix('state_')}_{name}"
            graph.outputs.append(value)


def _convolution(steps: _StepTape, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    rows, weight, state, *bias = node.inputs
    channels, width = (int(size) for size in weight.shape)
    every = steps.op("Concat", [state, steps.padded(rows)], {"axis": 1})  # [B, K - 1 + S', C]
    image = steps.op("Transpose", [steps.op("Unsqueeze", [every, steps.numbers(1)])], {"perm": [0, 3, 1, 2]})  # [B, C, 1, …]
    kernel = steps.op("Reshape", [weight, steps.numbers(channels, 1, 1, width)])  # ONNX Runtime folds it
    convolved = steps.op("Conv", [image, kernel, *bias], {"group": channels, "kernel_shape": [1, width]})
    output = steps.op("Squeeze", [steps.op("Transpose", [convolved], {"perm": [0, 2, 3, 1]}), steps.numbers(1)])
    if node.attributes["activation"].value == "silu":
        output = steps.op("QuickGelu", [output], {"alpha": 1.0}, MS_DOMAIN)
    return steps.packed(output), steps.last_rows(every, width - 1)


def _recurrence(steps: _StepTape, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    query, key, value, state, *gates = node.inputs
    key, value, *gates = map(steps.padded_with_zeros, (key, value, *gates))
    attributes = {
        "update_rule": node.attributes["rule"].value,
        "scale": node.attributes["scale"].value,
        "q_num_heads": node.attributes["query_heads"].value,
        "kv_num_heads": node.attributes["heads"].value,
    }
    output, updated = steps.ops("LinearAttention", [steps.padded(query), key, value, state, *gates], attributes, 2)
    return steps.packed(output), updated


def _unreshaped(value: ir.Value | None) -> ir.Value | None:
    """The source of two reshapes that cancel out, as where code splits rows into heads and the marker takes them whole."""
    outer = produced_by(value, "Reshape")
    inner = produced_by(outer.inputs[0], "Reshape") if outer is not None else None
    source = inner.inputs[0] if inner is not None else None
    return source if source is not None and source.shape == value.shape else value
