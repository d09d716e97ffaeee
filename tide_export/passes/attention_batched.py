"""Replace GroupQueryAttention by batched products: the CUDA provider's kernel rejects several tokens of several sequences.

    q, k, v = the step's tokens, padded to [B, S]                Gather(padded_from)
    q, k   = rotated q, rotated k                                RotaryEmbedding
    caches : k and v written at write_index                      TensorScatter, in place
    output = softmax(scale · q · keysᵀ + bias) · values          FusedMatMul, Add, Softmax, MatMul
    output : back to [1, T]                                      Gather(packed_from)

The G query heads that share a KV head are stacked, [B, KV, S·G, D], so that each KV head takes part in one product and not
in G small ones. Attention reads all slots of the cache, so the runtime keeps the number of slots close to the longest sequence's
length. Where only the caches are wanted, keys and values are rounded as the kernel does.

Besides the inputs of `attention_packed` the runtime fills:

    padded_position_ids [B, S]    (position_ids is [1, T])
    attention_bias [B, S, 1, slots] float32: 0 where a token may attend, -inf elsewhere; layers with a sliding window of W
                                  tokens read an input of their own, ``attention_bias_W``
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tide_export.passes.attention_gqa import HEAD_SINK, KEY_SCALE, MS_DOMAIN, optional_input
from tide_export.passes.attention_packed import PackedAttention, gathered, graph_input, packed_attentions, padded, remove_unused
from tide_export.passes.attention_products import softmax_with_sinks
from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, constant, dims, new_value


def lower_attention_batched(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("attention_batched")
    for attention in packed_attentions(model):
        if attention.node.outputs[0].uses():
            _lower(attention)
        else:
            _replace(attention, *_written(attention, *_rotated(attention)[1:]))
        report.applied += 1
    remove_unused(model)
    return report


def _lower(attention: PackedAttention) -> None:
    heads, tape = attention.heads, attention.tape
    query, key, value = _rotated(attention)
    keys, values = _written(attention, key, value)
    weights = _weights(attention, _stacked(attention, query, heads.group, heads.key_dim), keys)
    _replace(attention, keys, values, _packed(attention, tape.op("MatMul", [weights, values])))


def _replace(attention: PackedAttention, keys: ir.Value, values: ir.Value, output: ir.Value | None = None) -> None:
    """Replace the kernel by the recorded nodes. ``output``: None where only the caches are wanted."""
    node = attention.node
    attention.graph.insert_before(node, attention.tape.nodes)
    for old, new in zip(node.outputs, (output, keys, values), strict=True):
        if new is not None:
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    attention.graph.remove(node, safe=True)


def _written(attention: PackedAttention, key: ir.Value, value: ir.Value) -> list[ir.Value]:
    """The caches with the new keys and values [B, S, KV · width] in their slots."""
    node, heads, tape = attention.node, attention.heads, attention.tape
    written = graph_input(attention, "write_index", ir.DataType.INT64, "batch")
    caches = []
    for new, width, index in ((key, heads.key_dim, 1), (value, heads.value_dim, 2)):
        cache, old = node.inputs[index + 2], node.outputs[index]
        scale = optional_input(node, KEY_SCALE + index - 1)
        made = new_value(old.name, old, old.shape)
        rounded = new if scale is None else _rounded(attention, new, scale)
        tape.op("TensorScatter", [cache, _stacked(attention, rounded, 1, width), written], {"axis": 2}, output=made)
        caches.append(made)
    return caches


def _rounded(attention: PackedAttention, value: ir.Value, scale: ir.Value) -> ir.Value:
    """[B, S, KV · D] in int8, by ``scale`` [1, KV, 1, D]."""
    scales = constant(scale)
    assert scales is not None
    by_channel = array_initializer(attention.graph, f"{scale.name}.flat", scales.reshape(-1))
    wide = attention.tape.op("Cast", [value], {"to": ir.DataType.FLOAT})
    return attention.tape.op("QuantizeLinear", [wide, by_channel], {"axis": 2, "output_dtype": ir.DataType.INT8})


def _rotated(attention: PackedAttention) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value [B, S, heads · width], split if one product made them, rotated if the kernel did it."""
    heads = attention.heads
    query, key, value = attention.node.inputs[:3]
    widths = [heads.query * heads.key_dim, heads.kv * heads.key_dim, heads.kv * heads.value_dim]
    assert query is not None
    if key is None or value is None:
        query, key, value = attention.split(padded(attention, query, sum(widths)), *widths)
    else:
        query, key, value = (padded(attention, v, w) for v, w in zip((query, key, value), widths, strict=True))
    if attention.attribute("do_rotary"):  # one rotation of both, then a split, was slower than two rotations
        query, key = _rotate(attention, query, heads.query), _rotate(attention, key, heads.kv)
    return query, key, value


def _rotate(attention: PackedAttention, value: ir.Value, heads: int) -> ir.Value:
    cos, sin = attention.node.inputs[7:9]
    positions = graph_input(attention, "padded_position_ids", ir.DataType.INT64, "batch", "padded")
    attributes = {"interleaved": attention.attribute("rotary_interleaved")}
    width = 2 * dims(cos)[1]
    if width < attention.heads.key_dim:  # the kernel accepts num_heads only for partial rotary
        attributes |= {"num_heads": heads, "rotary_embedding_dim": width}
    return attention.tape.op("RotaryEmbedding", [value, positions, cos, sin], attributes, domain=MS_DOMAIN)


def _stacked(attention: PackedAttention, value: ir.Value, group: int, width: int) -> ir.Value:
    """[B, S, KV · group · width] as [B, KV, S · group, width]."""
    kv = attention.heads.kv
    if kv == 1:
        return attention.reshape(value, 0, 1, -1, width)
    by_head = attention.tape.op("Transpose", [attention.reshape(value, 0, 0, kv, group * width)], {"perm": [0, 2, 1, 3]})
    return by_head if group == 1 else attention.reshape(by_head, 0, kv, -1, width)


def _packed(attention: PackedAttention, value: ir.Value) -> ir.Value:
    """[B, KV, S · G, width] as [1, T, KV · G · width]."""
    kv, width = attention.heads.kv, attention.heads.group * attention.heads.value_dim
    if kv > 1:
        by_head = value if attention.heads.group == 1 else attention.reshape(value, 0, kv, -1, width)
        value = attention.tape.op("Transpose", [by_head], {"perm": [0, 2, 1, 3]})
    return gathered(attention, value, kv * width)


def _weights(attention: PackedAttention, query: ir.Value, keys: ir.Value) -> ir.Value:
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


def _scores(attention: PackedAttention, query: ir.Value, keys: ir.Value, scale: float) -> ir.Value:
    """scale · query · keysᵀ [B, KV, S · G, T]."""
    tape = attention.tape
    if attention.heads.group > 1:
        return tape.op("FusedMatMul", [query, keys], {"transB": 1, "alpha": scale}, domain=MS_DOMAIN)
    # ONNX Runtime has a matrix-vector kernel for a single query row (2.5x as fast), which FusedMatMul takes only without alpha.
    scaled = tape.op("Mul", [query, attention.number(scale, keys.dtype)])
    return tape.op("FusedMatMul", [scaled, keys], {"transB": 1}, domain=MS_DOMAIN)


def _bias(attention: PackedAttention) -> ir.Value:
    """The bias of the attention's window as [B, 1, S · G, T], expanded to stacked heads once per graph."""
    window, group = max(0, int(attention.attribute("local_window_size"))), attention.heads.group
    key = (window, group)
    if key not in attention.shared:
        name = f"attention_bias_{window}" if window else "attention_bias"
        bias = graph_input(attention, name, ir.DataType.FLOAT, "batch", "padded", 1, "slots")
        if group > 1:
            repeats = array_initializer(attention.graph, f"batched.group_{group}", np.array([1, 1, group, 1], np.int64))
            bias = attention.tape.op("Expand", [bias, repeats])
        attention.shared[key] = attention.reshape(bias, 0, 1, -1, 0)
    return attention.shared[key]


def _sinks(attention: PackedAttention) -> ir.Value | None:
    """The sinks [N] of the query heads as [1, KV, S · G, 1], or None."""
    sinks, kv, group, tape = optional_input(attention.node, HEAD_SINK), attention.heads.kv, attention.heads.group, attention.tape
    if sinks is None or group == 1:
        return None if sinks is None else attention.reshape(sinks, 1, kv, 1, 1)
    source = graph_input(attention, "padded_from", ir.DataType.INT64, "batch", "padded")
    count = tape.op("Shape", [source], {"start": 1, "end": 2})
    around = [array_initializer(attention.graph, f"batched.axis_{n}", np.array([n], np.int64)) for n in (1, kv, group)]
    shape = tape.op("Concat", [around[0], around[1], count, around[2]], {"axis": 0})
    return attention.reshape(tape.op("Expand", [attention.reshape(sinks, 1, kv, 1, group), shape]), 1, kv, -1, 1)
