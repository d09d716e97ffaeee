"""Keep GroupQueryAttention for several sequences in one step, on padded tokens: every step of the target ``cpu``.

The kernel takes several tokens of each sequence if it is told how many, ``query_seqlens``, and neither caches nor computes the
rows after them; a sequence with 0 tokens stays as it is. It sums a row that is alone in its tile in another order, so a row of
padding, which repeats the last token, follows each sequence's rows; its key lands in the slot that the next token overwrites.
Then a token's result has the same bits whatever shares the launch: prompts in chunks of any size, drafts under verification, and
sequences of other requests give the logits of single tokens, also where the model rounds activations, keys or values to few bits
and a last bit may become another number.

One GatherND pads and one packs again, of the packed [1, T, …] as it is: with a Reshape and a Gather each a step of SmolLM2 took
5% longer. Without any it would take 2% less again, but in sessions of their own, which pack all weights at load once more.

Inputs that the runtime fills:

    padded_rows [B, S, 2] int64   for each padded row its place (0, t) in the packed [1, T]; rows of padding repeat the last token
    packed_rows [1, T, 2] int64   for each token its place (b, s) in the padded [B, S]
    query_seqlens [B] int32       rows of each sequence that the kernel computes: its tokens and the padding after them, 0 if none
    padded_position_ids [B, S]    where the rotary embedding has two sets of factors: positions are the slots otherwise
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape
from tide_runtime.bundle.manifest import PAD_ATTENTION

from tide_export.passes.attention_gqa import POSITION_IDS, QUERY_SEQLENS, SEQLENS_K, optional_input, set_input
from tide_export.passes.attention_packed import remove_unused, rename_packed_dims
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, dims


def pad_attention(model: ir.Model, context: LoweringContext) -> PassReport:
    """Keep the kernel, on padded tokens."""
    report = PassReport(PAD_ATTENTION)
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "GroupQueryAttention"]
    if nodes:
        rename_packed_dims(graph)
    last_slots: ir.Value | None = None
    for node in nodes:
        last_slots = _pad_kernel(graph, node, last_slots)
        report.applied += 1
    remove_unused(model)
    return report


def _pad_kernel(graph: ir.Graph, node: ir.Node, last_slots: ir.Value | None) -> ir.Value:
    """Keep the kernel, on padded operands: rows after those that ``query_seqlens`` counts are neither cached nor computed.

    Returns ``last_slots``, which is computed once per graph.
    """
    tape = Tape()
    rows = _graph_input(graph, "padded_rows", ir.DataType.INT64, "batch", "padded", 2)
    for index in range(3):  # the first holds query, key and value where they are packed
        value = node.inputs[index]
        if value is not None:
            node.replace_input_with(index, tape.op("GatherND", [value, rows]))
    if optional_input(node, POSITION_IDS) is not None:
        set_input(node, POSITION_IDS, _graph_input(graph, "padded_position_ids", ir.DataType.INT64, "batch", "padded"))
    counts = _graph_input(graph, "query_seqlens", ir.DataType.INT32, "batch")
    set_input(node, QUERY_SEQLENS, counts)
    last_slots = last_slots or _last_slots(graph, tape, counts)
    node.replace_input_with(SEQLENS_K, last_slots)
    graph.insert_before(node, tape.nodes)
    output = node.outputs[0]
    tape = Tape()
    uses = list(output.uses())
    output.shape = None
    packed = tape.op("GatherND", [output, _graph_input(graph, "packed_rows", ir.DataType.INT64, 1, "tokens", 2)])
    width = node.attributes["num_heads"].as_int() * dims(node.inputs[4])[3]
    packed.type = output.type
    packed.shape = ir.Shape([1, "tokens", width])
    for user, index in uses:
        user.replace_input_with(index, packed)
    graph.insert_after(node, tape.nodes)
    return last_slots


def _last_slots(graph: ir.Graph, tape: Tape, counts: ir.Value) -> ir.Value:
    """``seqlens_k`` [B] with the rows that the kernel computes: each sequence's slots less one."""
    one, zero = (array_initializer(graph, f"batched.{n}_INT32", np.array(n, np.int32)) for n in (1, 0))
    before = tape.op("Cast", [_graph_input(graph, "write_index", ir.DataType.INT64, "batch")], {"to": ir.DataType.INT32})
    last = tape.op("Sub", [tape.op("Add", [before, counts]), one])
    return tape.op("Max", [last, zero])  # of an empty sequence too


def _graph_input(graph: ir.Graph, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    """The graph's input ``name``, added if missing."""
    found = next((v for v in graph.inputs if v.name == name), None)
    if found is None:
        found = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        graph.inputs.append(found)
    return found
