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

import onnx_ir as ir
from onnx_ir.tape import Tape
from tide_runtime.bundle.manifest import PAD_ATTENTION

from tide_export.passes.attention_gqa import POSITION_IDS, QUERY_SEQLENS, SEQLENS_K, optional_input, set_input
from tide_export.passes.attention_packed import PackedAttention, graph_input, packed_attentions, remove_unused
from tide_export.passes.base import LoweringContext, PassReport


def pad_attention(model: ir.Model, context: LoweringContext) -> PassReport:
    """Keep the kernel, on padded tokens."""
    report = PassReport(PAD_ATTENTION)
    for attention in packed_attentions(model):
        _pad_kernel(attention)
        report.applied += 1
    remove_unused(model)
    return report


def _pad_kernel(attention: PackedAttention) -> None:
    """Keep the kernel, on padded operands: rows after those that ``query_seqlens`` counts are neither cached nor computed."""
    node, heads = attention.node, attention.heads
    rows = graph_input(attention, "padded_rows", ir.DataType.INT64, "batch", "padded", 2)
    for index in range(3):  # the first holds query, key and value where they are packed
        value = node.inputs[index]
        if value is not None:
            node.replace_input_with(index, attention.tape.op("GatherND", [value, rows]))
    if optional_input(node, POSITION_IDS) is not None:
        set_input(node, POSITION_IDS, graph_input(attention, "padded_position_ids", ir.DataType.INT64, "batch", "padded"))
    counts = graph_input(attention, "query_seqlens", ir.DataType.INT32, "batch")
    set_input(node, QUERY_SEQLENS, counts)
    node.replace_input_with(SEQLENS_K, _last_slots(attention, counts))
    attention.graph.insert_before(node, attention.tape.nodes)
    attention.tape = Tape()
    output = node.outputs[0]
    uses, output.shape = list(output.uses()), None
    packed = attention.tape.op("GatherND", [output, graph_input(attention, "packed_rows", ir.DataType.INT64, 1, "tokens", 2)])
    packed.type, packed.shape = output.type, ir.Shape([1, "tokens", heads.query * heads.value_dim])
    for user, index in uses:
        user.replace_input_with(index, packed)
    attention.graph.insert_after(node, attention.tape.nodes)


def _last_slots(attention: PackedAttention, counts: ir.Value) -> ir.Value:
    """``seqlens_k`` [B] with the rows that the kernel computes: each sequence's slots less one, computed once per graph."""
    if "seqlens_k" not in attention.shared:
        tape, one, zero = attention.tape, *(attention.number(n, ir.DataType.INT32) for n in (1, 0))
        before = tape.op("Cast", [graph_input(attention, "write_index", ir.DataType.INT64, "batch")], {"to": ir.DataType.INT32})
        last = tape.op("Sub", [tape.op("Add", [before, counts]), one])
        attention.shared["seqlens_k"] = tape.op("Max", [last, zero])  # of an empty sequence too
    return attention.shared["seqlens_k"]
