"""Recognise rotary position embedding (Su et al. 2021) in a traced graph and tabulate its cos and sin.

A rotated tensor is ``x · cos + rotate(x) · sin`` with cos and sin computed from position_ids alone. Whatever the model's
scaling rule (linear, YaRN, Llama 3, partial, interleaved), evaluating that part of the graph for every position gives the
table that fused kernels read. Rules that depend on the length of the sequence (dynamic NTK) are no function of one position and
are not recognised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from tide_export.passes.graph_walk import constant, depends_only_on, dims, produced_by


@dataclass(frozen=True)
class Rotation:
    """``source`` [B, N, S, D] is rotated in its first ``width`` channels by angles whose cos/sin are the given values.

    ``by_token``: whether ``source`` is [B, S, N, D], and heads and tokens change places after the rotation.
    """

    source: ir.Value
    cos: ir.Value
    sin: ir.Value
    width: int
    interleaved: bool
    by_token: bool = False


def match_rotation(value: ir.Value, positions: ir.Value) -> Rotation | None:
    """The rotation that makes ``value`` [B, N, S, D], or None."""
    transpose = produced_by(value, "Transpose")
    if transpose is not None and transpose.inputs[0] is not None and list(transpose.attributes["perm"].value) == [0, 2, 1, 3]:
        rotation = match_rotation(transpose.inputs[0], positions)
        return replace(rotation, by_token=not rotation.by_token) if rotation is not None else None
    joined = produced_by(value, "Concat")
    if joined is not None and len(joined.inputs) == 2:  # partial rotary: the remaining channels are not rotated
        head, rest = (produced_by(v, "Slice") for v in joined.inputs)
        inner = _match_full(joined.inputs[0], positions)
        source = produced_by(inner.source, "Slice") if inner is not None else None
        if head is None and rest is not None and source is not None and rest.inputs[0] is source.inputs[0]:
            assert inner is not None and source.inputs[0] is not None
            if _slice_start(source) == 0 and _slice_start(rest) == inner.width:
                return Rotation(source.inputs[0], inner.cos, inner.sin, inner.width, inner.interleaved)
        return None
    return _match_full(value, positions)


def _match_full(value: ir.Value | None, positions: ir.Value) -> Rotation | None:
    total = produced_by(value, "Add")
    if total is None:
        return None
    for straight, turned in (total.inputs, reversed(total.inputs)):
        left, right = produced_by(straight, "Mul"), produced_by(turned, "Mul")
        if left is None or right is None:
            return None
        source, cos = left.inputs
        rotated, sin = right.inputs
        cos_table, sin_table = produced_by(cos, "Unsqueeze"), produced_by(sin, "Unsqueeze")
        if source is None or cos_table is None or sin_table is None:
            continue
        interleaved = _rotation_kind(rotated, source)
        shape = dims(source)
        if interleaved is None or shape is None or not isinstance(shape[-1], int):
            continue
        cos_value = cos_table.inputs[0]
        sin_value = sin_table.inputs[0]
        if cos_value is not None and sin_value is not None and depends_only_on(cos_value, positions):
            return Rotation(source, cos_value, sin_value, shape[-1], interleaved)
    return None


def _rotation_kind(rotated: ir.Value | None, source: ir.Value) -> bool | None:
    """False for swapped halves (-x2, x1), True for swapped neighbours (interleaved), None for neither."""
    joined = produced_by(rotated, "Concat")
    if joined is not None and len(joined.inputs) == 2:
        negated, first = produced_by(joined.inputs[0], "Neg"), produced_by(joined.inputs[1], "Slice")
        second = produced_by(negated.inputs[0], "Slice") if negated is not None else None
        if first is not None and second is not None and first.inputs[0] is source and second.inputs[0] is source:
            return False if _slice_start(first) == 0 else None
        return None
    flat = produced_by(rotated, "Reshape")
    stacked = produced_by(flat.inputs[0], "Concat") if flat is not None else None
    if stacked is None or len(stacked.inputs) != 2:
        return None
    wide = [produced_by(v, "Unsqueeze") for v in stacked.inputs]
    if wide[0] is None or wide[1] is None:
        return None
    negated, even = produced_by(wide[0].inputs[0], "Neg"), produced_by(wide[1].inputs[0], "Slice")
    odd = produced_by(negated.inputs[0], "Slice") if negated is not None else None
    if even is None or odd is None or even.inputs[0] is not source or odd.inputs[0] is not source:
        return None
    return True if (_slice_start(even), _slice_start(odd)) == (0, 1) else None


def _slice_start(node: ir.Node) -> int | None:
    start = constant(node.inputs[1])
    return None if start is None or start.size != 1 else int(start.reshape(()))


def rotary_tables(rotation: Rotation, graph: ir.Graph, positions: ir.Value, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """cos and sin [count, width / 2] fp32 of every position id; None when the two halves of the angles differ."""
    values = [_before_cast(rotation.cos), _before_cast(rotation.sin)]
    piece = ir.convenience.extract(graph, [positions], values)
    model = ir.Model(piece, ir_version=10)
    feeds = {positions.name: np.arange(count, dtype=np.int64)[None]}
    tables = [np.asarray(t[0], dtype=np.float32) for t in ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)]
    halves = [_half(t, rotation.interleaved) for t in tables]
    return None if halves[0] is None or halves[1] is None else (halves[0], halves[1])


def _before_cast(value: ir.Value) -> ir.Value:
    cast = produced_by(value, "Cast")
    return cast.inputs[0] if cast is not None and cast.inputs[0] is not None else value


def _half(table: np.ndarray, interleaved: bool) -> np.ndarray | None:
    half = table.shape[-1] // 2
    first, second = (table[:, ::2], table[:, 1::2]) if interleaved else (table[:, :half], table[:, half:])
    return np.ascontiguousarray(first) if np.array_equal(first, second) else None
