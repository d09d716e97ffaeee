"""Lower ``tide::CausalConv`` and ``tide::Recurrence`` to ONNX Runtime's kernels, for steps of several sequences on target cpu.

Both kernels compute one token after the other, so a token's result and the state after it have the same bits whatever shares the
launch. They take padded rows [B, S', …]. In a recurrence, rows of padding have decay 0 and beta 0 (without beta: key 0), which
leaves the state's bits alone. Of a convolution the new state is gathered from the old one and the sequence's own rows.
LinearAttention is 2 to 6 times faster than GatedDeltaNet, which takes packed rows, and the convolution twice as fast as the one
that takes them.

Input that the runtime fills, besides ``padded_rows`` and ``packed_rows`` of `pad_attention`:

    row_mask [B, S'] float32   1 for a sequence's tokens, 0 for padding; S' is the most tokens of a sequence, or more

For each state a graph outputs the operands of its update, packed rows [1, T, …] in fp32, ``undo_{layer}_{number}_…``: ``rows`` of
a convolution, ``key``, ``value``, ``decay`` and ``beta`` of a recurrence. `advance_graph` takes states over some of those rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from tide_export.passes.attention_gqa import MS_DOMAIN
from tide_export.passes.attention_packed import remove_unused, rename_packed_dims
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer
from tide_export.traced_attention import DOMAIN

CONVOLUTION, RECURRENCE = "CausalConv", "Recurrence"
_STATE = {CONVOLUTION: 2, RECURRENCE: 3}  # a marker's input
_OPERANDS = {CONVOLUTION: {"rows": 0}, RECURRENCE: {"key": 1, "value": 2, "decay": 4, "beta": 5}}


def pad_recurrence(model: ir.Model, context: LoweringContext) -> PassReport:
    report, graph = PassReport("pad_recurrence"), model.graph
    markers = [node for node in graph if node.domain == DOMAIN and node.op_type in _STATE]
    if not markers:
        return report
    rename_packed_dims(graph)
    steps = StepTape(graph)
    for node in markers:
        _output_operands(graph, node)
        made = _convolution(steps, node) if node.op_type == CONVOLUTION else _recurrence(steps, node)
        graph.insert_before(node, steps.taken())
        for old, new in zip(node.outputs, made, strict=True):
            name, new.type, new.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name, new.name = f"{name}.marker", name
        graph.remove(node, safe=True)
        report.applied += 1
    model.opset_imports[MS_DOMAIN] = 1
    model.opset_imports.pop(DOMAIN, None)
    remove_unused(model)
    return report


class StepTape:
    """Records nodes that map between packed tokens and padded sequences; those that all layers read are made once per graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self._tape = graph, Tape()
        self._shared: dict[object, ir.Value] = {}

    def taken(self) -> Sequence[ir.Node]:
        """The nodes that were recorded since the last call."""
        nodes, self._tape = self._tape.nodes, Tape()
        return nodes

    def op(self, name: str, inputs: Sequence[ir.Value | None], attributes: dict | None = None, domain: str = "") -> ir.Value:
        return self._tape.op(name, inputs, attributes, domain=domain)

    def updated(self, name: str, inputs: Sequence[ir.Value | None], attributes: dict) -> Sequence[ir.Value]:
        """Output and new state of one of ONNX Runtime's kernels."""
        return self._tape.op_multi_out(name, inputs, attributes, num_outputs=2, domain=MS_DOMAIN)

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
        if "padded" not in self._shared:  # attention may take more rows of padding
            places = self.input("padded_rows", ir.DataType.INT64, "batch", "padded", 2)
            width = self.op("Shape", [self._row_mask], {"start": 1, "end": 2})
            self._shared["padded"] = self.op("Slice", [places, self.numbers(0), width, self.numbers(1)])
        return self.op("GatherND", [rows, self._shared["padded"]])

    def packed(self, padded: ir.Value) -> ir.Value:
        """[B, S', C] as [1, T, C]."""
        return self.op("GatherND", [padded, self.input("packed_rows", ir.DataType.INT64, 1, "tokens", 2)])

    def masked(self, padded: ir.Value) -> ir.Value:
        """[B, S', C] with zeros in rows of padding."""
        if "mask" not in self._shared:
            self._shared["mask"] = self.op("Unsqueeze", [self._row_mask, self.numbers(-1)])
        return self.op("Mul", [padded, self._shared["mask"]])

    def last_rows(self, state: ir.Value, padded: ir.Value, count: int) -> ir.Value:
        """The last ``count`` of ``state`` [B, count, C] and each sequence's rows of [B, S', C]."""
        if count not in self._shared:
            if "counts" not in self._shared:
                total = self.op("ReduceSum", [self._row_mask, self.numbers(1)], {"keepdims": 1})
                self._shared["counts"] = self.op("Cast", [total], {"to": ir.DataType.INT64})
            places = self.op("Add", [self._shared["counts"], self.numbers(*range(count))])
            self._shared[count] = self.op("Unsqueeze", [places, self.numbers(-1)])
        every = self.op("Concat", [state, padded], {"axis": 1})
        return self.op("GatherND", [every, self._shared[count]], {"batch_dims": 1})

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
            output = ir.Value(name=f"undo_{state.name.removeprefix('state_')}_{name}", type=value.type, shape=value.shape)
            graph.insert_before(node, [ir.node("Identity", [value], outputs=[output])])
            graph.outputs.append(output)


def _convolution(steps: StepTape, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    rows, weight, state, *bias = node.inputs
    padded = steps.padded(rows)
    kernel = steps.op("Unsqueeze", [weight, steps.numbers(1)])  # [C, 1, K], folded
    attributes = {"activation": node.attributes["activation"].value, "channels_last": 1}
    output, _ = steps.updated("CausalConvWithState", [padded, kernel, bias[0] if bias else None, state], attributes)
    return steps.packed(output), steps.last_rows(state, padded, state.shape[1])


def _recurrence(steps: StepTape, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    query, key, value, state, *gates = node.inputs
    output, updated = recurrence(
        steps,
        steps.padded(query),
        steps.padded(key),
        steps.padded(value),
        state,
        [steps.padded(gate) for gate in gates],
        {
            "update_rule": node.attributes["rule"].value,
            "scale": node.attributes["scale"].value,
            "q_num_heads": node.attributes["query_heads"].value,
            "kv_num_heads": node.attributes["heads"].value,
        },
    )
    return steps.packed(output), updated


def recurrence(
    steps: StepTape,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    state: ir.Value,
    gates: Sequence[ir.Value],
    attributes: dict,
) -> Sequence[ir.Value]:
    """LinearAttention over padded rows, of which padding leaves the state alone; ``gates``: decay, and beta if there is one."""
    key = key if len(gates) > 1 else steps.masked(key)
    return steps.updated("LinearAttention", [query, key, value, state, *map(steps.masked, gates)], attributes)
