"""A segment that is one attention, with the inputs that segments have; ``hidden`` only gives the number of tokens."""

from __future__ import annotations

import onnx_ir as ir

SLOTS, KV_HEADS, KEY_DIM, VALUE_DIM = 24, 2, 16, 8


def one_attention(dtype: ir.DataType, heads: int, window: int, softcap: float, sinks: bool = False) -> ir.Model:
    """The traced form: a ``tide::Attention`` over caches of ``SLOTS`` slots, and over an input ``sinks`` [N] if wanted."""
    batched = {"query": (heads, "seq", KEY_DIM), "key": (KV_HEADS, "seq", KEY_DIM), "value": (KV_HEADS, "seq", VALUE_DIM)}
    caches = {"key_cache_0": (KV_HEADS, SLOTS, KEY_DIM), "value_cache_0": (KV_HEADS, SLOTS, VALUE_DIM)}
    tensors = [ir.val(name, dtype=dtype, shape=["batch", *shape]) for name, shape in (batched | caches).items()]
    write_index = ir.val("write_index", dtype=ir.DataType.INT64, shape=["batch"])
    further = [ir.val("sinks", dtype=dtype, shape=[heads])] if sinks else []
    hidden = ir.val("hidden", dtype=dtype, shape=["batch", "seq", 4])
    attributes = {"scale": KEY_DIM**-0.5, "softcap": softcap, "window": window}
    node = ir.node("Attention", [*tensors, write_index, *further], attributes=attributes, domain="tide", num_outputs=3)
    shapes = [("batch", "seq", heads, VALUE_DIM), *(value.shape for value in tensors[3:])]
    for output, name, shape in zip(node.outputs, ("output", "key_cache_out_0", "value_cache_out_0"), shapes, strict=True):
        output.name, output.dtype, output.shape = name, dtype, ir.Shape(shape)
    inputs, opsets = [hidden, *tensors, write_index, *further], {"": 24, "tide": 1}
    return ir.Model(ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=opsets, name="one"), ir_version=10)
