"""Lower ``tide::Attention`` to ONNX Runtime's GroupQueryAttention, rotary embedding and cache update included.

Its cost grows with the valid length of each sequence; the cost of the standard Attention operator grows with the cache's size.
The operator takes unrotated operands [B, S, N·D], so the pass removes the transposes and rotary nodes that it recognises. Two
inputs replace ``write_index``: ``seqlens_k`` [B] int32 = write_index + S - 1 and ``total_sequence_length`` int32 =
max(write_index) + S.

With `LoweringContext.kv_scales` the caches are int8, one scale for each channel of a KV head: ONNX Runtime 1.32 rounds what it
writes and computes with the rounded numbers, a step's own tokens included.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.base import LoweringContext, PassReport
from tide_export.passes.graph_walk import array_initializer, dims, insert_before, new_value, produced_by, sinks_of
from tide_export.passes.rotary import Rotation, match_rotation, rotary_tables

MS_DOMAIN = "com.microsoft"
# Indices of the operator's inputs; all but the first are optional.
SEQLENS_K = 5
POSITION_IDS = 9  # [B, S] int64, where they are not the tokens' slots
HEAD_SINK = 11  # [N]: a logit of each query head that takes part in its softmax and has no value
KEY_SCALE, VALUE_SCALE = 12, 13  # [1, KV, 1, D] float32: scales of int8 caches
QUERY_SEQLENS = 16  # [B] int32: rows of each sequence that are computed, the first of S


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index`` of a GroupQueryAttention, or None."""
    return node.inputs[index] if len(node.inputs) > index else None


def set_input(node: ir.Node, index: int, value: ir.Value) -> None:
    """Set an optional input of a GroupQueryAttention."""
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(index, value)


@dataclass
class _Shared:
    """Values that all attentions of one graph share: sequence lengths and rotary tables."""

    lengths: tuple[ir.Value, ir.Value]
    tables: dict[tuple[int, int], tuple[ir.Value, ir.Value] | None] = field(default_factory=dict)


def lower_attention_gqa(model: ir.Model, context: LoweringContext) -> PassReport:
    report = PassReport("attention_gqa")
    graph = model.graph
    attentions = [n for n in graph if n.domain == "tide" and n.op_type == "Attention"]
    if not attentions:
        return report
    positions = next(v for v in graph.inputs if v.name == "position_ids")
    shared = _Shared(_add_length_inputs(graph))
    for node in attentions:
        _lower(graph, node, positions, shared, context, report)
    model.opset_imports[MS_DOMAIN] = 1
    model.opset_imports.pop("tide", None)
    common.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        if value.name in ("position_ids", "write_index") and not value.uses():
            graph.inputs.remove(value)
    return report


def _add_length_inputs(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """Add the kernel's form of ``write_index`` as inputs, so that no segment computes it with six small nodes."""
    int32 = ir.TensorType(ir.DataType.INT32)
    seqlens = ir.Value(name="seqlens_k", type=int32, shape=ir.Shape(["batch"]))
    total = ir.Value(name="total_sequence_length", type=int32, shape=ir.Shape([]))
    graph.inputs.extend([seqlens, total])
    return seqlens, total


def _lower(
    graph: ir.Graph, node: ir.Node, positions: ir.Value, shared: _Shared, context: LoweringContext, report: PassReport
) -> None:
    query, key, value, key_cache, value_cache = node.inputs[:5]
    assert query is not None and key is not None and value is not None
    rotation = _common_rotation(query, key, positions)
    tables = _tables(graph, rotation, positions, shared, context) if rotation is not None else None
    if rotation is not None and tables is not None:
        query, key = (_by_head(graph, node, part) for part in rotation)
    else:
        report.skip(node.outputs[1].name, "no rotary embedding recognised in front of it (kept as plain nodes)")
    heads = dims(query)[1]
    kv_heads = dims(key)[1]
    flat = {v: _flat(graph, node, v) for v in dict.fromkeys((query, key, value))}  # keys may be the values, too
    operands = [flat[v] for v in (query, key, value)]
    cos_sin = list(tables) if tables is not None else [None, None]
    softcap = float(node.attributes["softcap"].value)
    window = int(node.attributes["window"].value)
    output, key_out, value_out = node.outputs
    fused = ir.node(
        "GroupQueryAttention",
        [*operands, key_cache, value_cache, *shared.lengths, *cos_sin],
        attributes={
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "scale": float(node.attributes["scale"].value),
            "softcap": softcap,
            "local_window_size": window if window > 0 else -1,
            "do_rotary": int(tables is not None),
            "rotary_interleaved": int(tables is not None and rotation is not None and rotation[0].interleaved),
        },
        domain=MS_DOMAIN,
        outputs=[
            new_value(f"{output.name}.gqa", output),
            new_value(f"{key_out.name}", key_out),
            new_value(f"{value_out.name}", value_out),
        ],
    )
    sinks = sinks_of(node)
    if sinks is not None:
        set_input(fused, HEAD_SINK, sinks)
    if tables is not None and context.long_rotary_from is not None:
        set_input(fused, POSITION_IDS, positions)
    if context.kv_scales:
        _round_caches(graph, fused, context)
    head_dim = dims(value)[3]
    unflatten = ir.node(
        "Reshape",
        [
            fused.outputs[0],
            array_initializer(graph, f"gqa.heads_{heads}_{head_dim}", np.array([0, 0, heads, head_dim])),
        ],
        outputs=[new_value(f"{output.name}.heads", output, output.shape)],
    )
    insert_before(graph, node, fused, unflatten)
    _bypass_head_merge(output, fused.outputs[0], heads * head_dim)
    ir.convenience.replace_all_uses_with(output, unflatten.outputs[0])
    for old, new in ((key_out, fused.outputs[1]), (value_out, fused.outputs[2])):
        new.shape = old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    report.applied += 1


def _round_caches(graph: ir.Graph, attention: ir.Node, context: LoweringContext) -> None:
    """Make the caches int8, inputs and outputs, with the scales of the layer in their name."""
    for kind, index in (("key", KEY_SCALE), ("value", VALUE_SCALE)):
        cache = attention.inputs[index - KEY_SCALE + 3]
        written = attention.outputs[index - KEY_SCALE + 1]
        assert cache is not None and cache.name is not None
        scales = getattr(context.kv_scales[int(cache.name.rpartition("_")[2])], kind)
        set_input(attention, index, array_initializer(graph, f"{cache.name}.scale", scales[None, :, None]))
        cache.type = written.type = ir.TensorType(ir.DataType.INT8)
        attention.attributes.add(ir.AttrString(f"{kind[0]}_quant_type", "PER_CHANNEL"))
    attention.attributes.add(ir.AttrInt64("kv_cache_bit_width", 8))


def _bypass_head_merge(output: ir.Value, flat: ir.Value, width: int) -> None:
    """Connect consumers of the model's reshape [B, S, N, D] → [B, S, N·D] to the kernel's output, which has that shape."""
    flat.shape = ir.Shape([*list(output.shape)[:2], width])
    for use in output.uses():
        user = use.node
        while user.op_type == "Identity" and len(user.outputs[0].uses()) == 1:
            user = next(iter(user.outputs[0].uses())).node
        if user.op_type == "Reshape" and user.outputs[0].shape == flat.shape:
            ir.convenience.replace_all_uses_with(user.outputs[0], flat)


def _common_rotation(query: ir.Value, key: ir.Value, positions: ir.Value) -> tuple[Rotation, Rotation] | None:
    query_rotation, key_rotation = match_rotation(query, positions), match_rotation(key, positions)
    if query_rotation is None or key_rotation is None:
        return None
    forms = [(one.width, one.interleaved) for one in (query_rotation, key_rotation)]
    same_angles = query_rotation.cos is key_rotation.cos and query_rotation.sin is key_rotation.sin
    return (query_rotation, key_rotation) if forms[0] == forms[1] and same_angles else None


def _by_head(graph: ir.Graph, anchor: ir.Node, rotation: Rotation) -> ir.Value:
    """What is rotated, [B, N, S, D]."""
    source = rotation.source
    shape = dims(rotation.source)
    if not rotation.by_token:
        return source
    assert shape is not None
    by_head = new_value(f"{source.name}.{anchor.outputs[1].name}", source, ir.Shape([shape[i] for i in (0, 2, 1, 3)]))
    insert_before(graph, anchor, ir.node("Transpose", [source], {"perm": [0, 2, 1, 3]}, outputs=[by_head]))
    return by_head


def _tables(
    graph: ir.Graph, rotation: tuple[Rotation, Rotation], positions: ir.Value, shared: _Shared, context: LoweringContext
) -> tuple[ir.Value, ir.Value] | None:
    query_rotation = rotation[0]
    if query_rotation.width % 16:
        return None  # the kernel requires half the rotated width to be a multiple of 8
    key = (id(query_rotation.cos), id(query_rotation.sin))
    if key not in shared.tables:
        tables = rotary_tables(query_rotation, graph, positions, context.position_ids)
        shared.tables[key] = None
        if tables is not None:
            dtype = query_rotation.source.dtype
            assert dtype is not None
            names = (f"rope.cos_{len(shared.tables)}", f"rope.sin_{len(shared.tables)}")
            made = [array_initializer(graph, n, t.astype(dtype.numpy())) for n, t in zip(names, tables, strict=True)]
            shared.tables[key] = (made[0], made[1])
    return shared.tables[key]


def _flat(graph: ir.Graph, anchor: ir.Node, value: ir.Value) -> ir.Value:
    """``value`` [B, N, S, D] as [B, S, N·D]: the model's own source of a reshape and transpose, or new nodes."""
    shape = dims(value)
    assert shape is not None
    _, heads, _, width = shape
    transpose = produced_by(value, "Transpose")
    if transpose is not None and list(transpose.attributes["perm"].value) == [0, 2, 1, 3]:
        by_token = transpose.inputs[0]
        assert by_token is not None
        reshape = produced_by(by_token, "Reshape")
        source = reshape.inputs[0] if reshape is not None else None
        if source is not None and source.shape is not None and len(source.shape) == 3:
            return source
    else:
        rows = new_value(f"{value.name}.{anchor.outputs[1].name}.rows", value)  # several layers may read one layer's keys
        back = ir.node("Transpose", [value], attributes={"perm": [0, 2, 1, 3]}, outputs=[rows])
        insert_before(graph, anchor, back)
        by_token = back.outputs[0]
    assert isinstance(heads, int) and isinstance(width, int)
    target = array_initializer(graph, f"gqa.flat_{heads * width}", np.array([0, 0, heads * width]))
    flat = ir.node(
        "Reshape",
        [by_token, target],
        outputs=[new_value(f"{value.name}.{anchor.outputs[1].name}.flat", value, ir.Shape([shape[0], shape[2], heads * width]))],
    )
    insert_before(graph, anchor, flat)
    return flat.outputs[0]
