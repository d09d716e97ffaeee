"""Attention of several sequences in one step: GroupQueryAttention on padded tokens, or batched products in its place.

The batch may be ragged: GEMMs run on the step's T tokens, packed to [1, T, H] sequence after sequence; only attention and its
copies also process padding.

`pad_attention` keeps the kernel, in every step of the target ``cpu``. The kernel takes several tokens of each sequence if it is
told how many, ``query_seqlens``, and neither caches nor computes the rows behind them; a sequence with 0 tokens stays as it is.
It sums a single row in another order than several, so a sequence's only token is there twice; the copy's key lands in the slot
that the next token overwrites. Then a token's result has the same bits whatever shares the launch: prompts in chunks of any size,
drafts under verification, and sequences in company give the logits of single tokens, also where the model rounds activations,
keys or values to few bits and a last bit may become another number.

`lower_attention_batched` replaces the kernel where it cannot run: on the CUDA provider, which rejects several tokens of several
sequences over filled caches; for prompt tokens in another order than the text's (`lower_attention_scattered`); and where only the
caches are wanted (`tide_export.kv_fill`).

    q, k, v = the step's tokens, padded to [B, S]                Gather(padded_from)
    q, k   = rotated q, rotated k                                RotaryEmbedding
    caches : k and v written at write_index                      TensorScatter, in place
    output = softmax(scale · q · keysᵀ + bias) · values          FusedMatMul, Add, Softmax, MatMul
    output : back to [1, T]                                      Gather(packed_from)

The G query heads that share a KV head are stacked, [B, KV, S·G, D], so that each KV head takes part in one product and not
in G small ones. Attention reads all slots of the cache, so the runtime keeps the number of slots close to the longest sequence's
length. Where only the caches are wanted, keys and values are rounded as the kernel does.

Besides the contract's inputs the runtime fills:

    padded_from [B, S]            index into the T tokens; sequences with fewer than S tokens repeat one of theirs
    packed_from [T]               index of each token in the padded [B · S]
    padded_position_ids [B, S]    (position_ids is [1, T])
    attention_bias [B, S, 1, slots] float32: 0 where a token may attend, -inf elsewhere; layers with a sliding window of W
                                  tokens read an input of their own, ``attention_bias_W``
    query_seqlens [B] int32       rows of each sequence that the kernel computes: its tokens, at least two unless it has none
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir.tape import Tape
from tide_runtime.bundle.manifest import PAD_ATTENTION

from tide_export.passes.attention_gqa import (
    HEAD_SINK,
    KEY_SCALE,
    MS_DOMAIN,
    QUERY_SEQLENS,
    SEQLENS_K,
    optional_input,
    set_input,
)
from tide_export.passes.attention_products import softmax_with_sinks
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, constant, dims, new_value, rename_dims


@dataclass(frozen=True)
class _Heads:
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
class _Attention:
    """One attention being rewritten. ``shared``: values that several attentions of the graph read, by what they depend on."""

    graph: ir.Graph
    node: ir.Node
    heads: _Heads
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


def lower_attention_batched(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("attention_batched")
    attentions = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    if attentions:
        _rename_packed_dims(model.graph)
    shared: dict[object, ir.Value] = {}
    for node in attentions:
        attention = _Attention(model.graph, node, _heads(node), shared)
        if node.outputs[0].uses():
            _lower(attention)
        else:
            _replace(attention, *_written(attention, *_rotated(attention)[1:]))
        report.applied += 1
    _remove_unused(model)
    return report


def pad_attention(model: ir.Model, context: LoweringContext) -> PassReport:
    """Keep the kernel, on padded tokens."""
    report = PassReport(PAD_ATTENTION)
    attentions = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    if attentions:
        _rename_packed_dims(model.graph)
    shared: dict[object, ir.Value] = {}
    for node in attentions:
        _pad_kernel(_Attention(model.graph, node, _heads(node), shared))
        report.applied += 1
    _remove_unused(model)
    return report


def _remove_unused(model: ir.Model) -> None:
    common.RemoveUnusedNodesPass()(model)
    for value in list(model.graph.inputs):
        if not value.uses():
            model.graph.inputs.remove(value)


def _rename_packed_dims(graph: ir.Graph) -> None:
    """Rename [B, S] to [1, T] in every value except the caches and the inputs that index them."""
    unchanged = {"write_index", "seqlens_k", *(v.name for v in (*graph.inputs, *graph.outputs) if "_cache_" in (v.name or ""))}
    batch, seq = next(v for v in graph.inputs if v.name in ("input_ids", "hidden")).shape[:2]
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    rename_dims((v for v in values if v.name not in unchanged), {batch: 1, seq: "tokens"})


def _heads(node: ir.Node) -> _Heads:
    key_cache, value_cache = node.inputs[3:5]
    return _Heads(node.attributes["num_heads"].value, dims(key_cache)[1], dims(key_cache)[3], dims(value_cache)[3])


def _lower(attention: _Attention) -> None:
    heads, tape = attention.heads, attention.tape
    query, key, value = _rotated(attention)
    keys, values = _written(attention, key, value)
    weights = _weights(attention, _stacked(attention, query, heads.group, heads.key_dim), keys)
    _replace(attention, keys, values, _packed(attention, tape.op("MatMul", [weights, values])))


def _replace(attention: _Attention, keys: ir.Value, values: ir.Value, output: ir.Value | None = None) -> None:
    """Replace the kernel by the recorded nodes. ``output``: None where only the caches are wanted."""
    node = attention.node
    attention.graph.insert_before(node, attention.tape.nodes)
    for old, new in zip(node.outputs, (output, keys, values), strict=True):
        if new is not None:
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    attention.graph.remove(node, safe=True)


def _pad_kernel(attention: _Attention) -> None:
    """Keep the kernel, on padded operands: rows behind those that ``query_seqlens`` counts are neither cached nor computed."""
    node, heads = attention.node, attention.heads
    widths = [heads.query * heads.key_dim, heads.kv * heads.key_dim, heads.kv * heads.value_dim]
    if node.inputs[1] is None:
        widths[0] = sum(widths)  # query, key and value in one
    for index, width in enumerate(widths):
        value = node.inputs[index]
        if value is not None:
            node.replace_input_with(index, _padded(attention, value, width))
    counts = _input(attention, "query_seqlens", ir.DataType.INT32, "batch")
    set_input(node, QUERY_SEQLENS, counts)
    node.replace_input_with(SEQLENS_K, _last_slots(attention, counts))
    attention.graph.insert_before(node, attention.tape.nodes)
    attention.tape = Tape()
    output = node.outputs[0]
    uses, output.shape = list(output.uses()), None
    packed = _gathered(attention, output, heads.query * heads.value_dim)
    for user, index in uses:
        user.replace_input_with(index, packed)
    attention.graph.insert_after(node, attention.tape.nodes)


def _last_slots(attention: _Attention, counts: ir.Value) -> ir.Value:
    """``seqlens_k`` [B] with the rows that the kernel computes: each sequence's slots less one, computed once per graph."""
    if "seqlens_k" not in attention.shared:
        tape, one, zero = attention.tape, *(attention.number(n, ir.DataType.INT32) for n in (1, 0))
        before = tape.op("Cast", [_input(attention, "write_index", ir.DataType.INT64, "batch")], {"to": ir.DataType.INT32})
        last = tape.op("Sub", [tape.op("Add", [before, counts]), one])
        attention.shared["seqlens_k"] = tape.op("Max", [last, zero])  # of an empty sequence too
    return attention.shared["seqlens_k"]


def _written(attention: _Attention, key: ir.Value, value: ir.Value) -> list[ir.Value]:
    """The caches with the new keys and values [B, S, KV · width] in their slots."""
    node, heads, tape = attention.node, attention.heads, attention.tape
    written = _input(attention, "write_index", ir.DataType.INT64, "batch")
    caches = []
    for new, width, index in ((key, heads.key_dim, 1), (value, heads.value_dim, 2)):
        cache, old = node.inputs[index + 2], node.outputs[index]
        scale = optional_input(node, KEY_SCALE + index - 1)
        made = new_value(old.name, old, old.shape)
        rounded = new if scale is None else _rounded(attention, new, scale)
        tape.op("TensorScatter", [cache, _stacked(attention, rounded, 1, width), written], {"axis": 2}, output=made)
        caches.append(made)
    return caches


def _rounded(attention: _Attention, value: ir.Value, scale: ir.Value) -> ir.Value:
    """[B, S, KV · D] in int8, by ``scale`` [1, KV, 1, D]."""
    scales = constant(scale)
    assert scales is not None
    by_channel = array_initializer(attention.graph, f"{scale.name}.flat", scales.reshape(-1))
    wide = attention.tape.op("Cast", [value], {"to": ir.DataType.FLOAT})
    return attention.tape.op("QuantizeLinear", [wide, by_channel], {"axis": 2, "output_dtype": ir.DataType.INT8})


def _rotated(attention: _Attention) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value [B, S, heads · width], split if one product made them, rotated if the kernel did it."""
    heads = attention.heads
    query, key, value = attention.node.inputs[:3]
    widths = [heads.query * heads.key_dim, heads.kv * heads.key_dim, heads.kv * heads.value_dim]
    assert query is not None
    if key is None or value is None:
        query, key, value = attention.split(_padded(attention, query, sum(widths)), *widths)
    else:
        query, key, value = (_padded(attention, v, w) for v, w in zip((query, key, value), widths, strict=True))
    if attention.attribute("do_rotary"):  # one rotation of both, then a split, was slower than two rotations
        query, key = _rotate(attention, query, heads.query), _rotate(attention, key, heads.kv)
    return query, key, value


def _padded(attention: _Attention, value: ir.Value, width: int) -> ir.Value:
    """[1, T, width] as [B, S, width]."""
    source = _input(attention, "padded_from", ir.DataType.INT64, "batch", "padded")
    return attention.tape.op("Gather", [attention.reshape(value, -1, width), source], {"axis": 0})


def _rotate(attention: _Attention, value: ir.Value, heads: int) -> ir.Value:
    cos, sin = attention.node.inputs[7:9]
    positions = _input(attention, "padded_position_ids", ir.DataType.INT64, "batch", "padded")
    attributes = {"interleaved": attention.attribute("rotary_interleaved")}
    width = 2 * dims(cos)[1]
    if width < attention.heads.key_dim:  # the kernel accepts num_heads only for partial rotary
        attributes |= {"num_heads": heads, "rotary_embedding_dim": width}
    return attention.tape.op("RotaryEmbedding", [value, positions, cos, sin], attributes, domain=MS_DOMAIN)


def _stacked(attention: _Attention, value: ir.Value, group: int, width: int) -> ir.Value:
    """[B, S, KV · group · width] as [B, KV, S · group, width]."""
    kv = attention.heads.kv
    if kv == 1:
        return attention.reshape(value, 0, 1, -1, width)
    by_head = attention.tape.op("Transpose", [attention.reshape(value, 0, 0, kv, group * width)], {"perm": [0, 2, 1, 3]})
    return by_head if group == 1 else attention.reshape(by_head, 0, kv, -1, width)


def _packed(attention: _Attention, value: ir.Value) -> ir.Value:
    """[B, KV, S · G, width] as [1, T, KV · G · width]."""
    kv, width = attention.heads.kv, attention.heads.group * attention.heads.value_dim
    if kv > 1:
        by_head = value if attention.heads.group == 1 else attention.reshape(value, 0, kv, -1, width)
        value = attention.tape.op("Transpose", [by_head], {"perm": [0, 2, 1, 3]})
    return _gathered(attention, value, kv * width)


def _gathered(attention: _Attention, value: ir.Value, width: int) -> ir.Value:
    """The step's tokens [1, T, width] of padded ones [B, S, …]."""
    source = _input(attention, "packed_from", ir.DataType.INT64, 1, "tokens")
    return attention.tape.op("Gather", [attention.reshape(value, -1, width), source], {"axis": 0})


def _weights(attention: _Attention, query: ir.Value, keys: ir.Value) -> ir.Value:
    """softmax(scale · query · keysᵀ + bias) [B, KV, S · G, T], computed in float32 and cast back."""
    tape, softcap = attention.tape, float(attention.attribute("softcap"))
    scores = _scores(attention, query, keys, float(attention.attribute("scale")) / (softcap or 1.0))
    narrow = None if keys.dtype == ir.DataType.FLOAT else keys.dtype
    if narrow is not None:
        scores = tape.op("Cast", [scores], {"to": ir.DataType.FLOAT})
    if softcap:
        scores = tape.op("Mul", [tape.op("Tanh", [scores]), attention.number(softcap, ir.DataType.FLOAT)])
    seen, sinks = tape.op("Add", [scores, _bias(attention)]), _sinks(attention)
    if sinks is None:
        weights = tape.op("Softmax", [seen], {"axis": -1})
    else:
        weights = softmax_with_sinks(attention.graph, tape, seen, sinks)
    return weights if narrow is None else tape.op("Cast", [weights], {"to": narrow})


def _scores(attention: _Attention, query: ir.Value, keys: ir.Value, scale: float) -> ir.Value:
    """scale · query · keysᵀ [B, KV, S · G, T]."""
    tape = attention.tape
    if attention.heads.group > 1:
        return tape.op("FusedMatMul", [query, keys], {"transB": 1, "alpha": scale}, domain=MS_DOMAIN)
    # ONNX Runtime has a matrix-vector kernel for a single query row (2.5x as fast), which FusedMatMul takes only without alpha.
    scaled = tape.op("Mul", [query, attention.number(scale, keys.dtype)])
    return tape.op("FusedMatMul", [scaled, keys], {"transB": 1}, domain=MS_DOMAIN)


def _bias(attention: _Attention) -> ir.Value:
    """The bias of the attention's window as [B, 1, S · G, T], expanded to stacked heads once per graph."""
    window, group = max(0, int(attention.attribute("local_window_size"))), attention.heads.group
    key = (window, group)
    if key not in attention.shared:
        name = f"attention_bias_{window}" if window else "attention_bias"
        bias = _input(attention, name, ir.DataType.FLOAT, "batch", "padded", 1, "slots")
        if group > 1:
            repeats = array_initializer(attention.graph, f"batched.group_{group}", np.array([1, 1, group, 1], np.int64))
            bias = attention.tape.op("Expand", [bias, repeats])
        attention.shared[key] = attention.reshape(bias, 0, 1, -1, 0)
    return attention.shared[key]


def _sinks(attention: _Attention) -> ir.Value | None:
    """The sinks [N] of the query heads as [1, KV, S · G, 1], or None."""
    sinks, kv, group, tape = optional_input(attention.node, HEAD_SINK), attention.heads.kv, attention.heads.group, attention.tape
    if sinks is None or group == 1:
        return None if sinks is None else attention.reshape(sinks, 1, kv, 1, 1)
    count = tape.op("Shape", [_input(attention, "padded_from", ir.DataType.INT64, "batch", "padded")], {"start": 1, "end": 2})
    around = [array_initializer(attention.graph, f"batched.axis_{n}", np.array([n], np.int64)) for n in (1, kv, group)]
    shape = tape.op("Concat", [around[0], around[1], count, around[2]], {"axis": 0})
    return attention.reshape(tape.op("Expand", [attention.reshape(sinks, 1, kv, 1, group), shape]), 1, kv, -1, 1)


def _input(attention: _Attention, name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    """The graph's input ``name``, added if missing."""
    found = next((v for v in attention.graph.inputs if v.name == name), None)
    if found is None:
        found = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        attention.graph.inputs.append(found)
    return found
