"""Graphs whose tokens are packed: [1, T, …], sequence after sequence, in place of [B, S, …]."""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir
import onnx_ir.passes.common as common

from tide_export.passes.graph_walk import rename_dims


class Named(Protocol):
    """An input or output of a graph."""

    @property
    def name(self) -> str | None: ...


def is_kept(value: Named) -> bool:
    """Whether a layer keeps it: a cache of keys or values, or a state."""
    return "_cache_" in (value.name or "") or (value.name or "").startswith("state_")


def rename_packed_dims(graph: ir.Graph) -> None:
    """Rename [B, S] to [1, T] in every value except caches, states, and the inputs that index them."""
    unchanged = {"write_index", "seqlens_k", *(v.name for v in (*graph.inputs, *graph.outputs) if is_kept(v))}
    batch, seq = next(v for v in graph.inputs if v.name in ("input_ids", "hidden")).shape[:2]
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    rename_dims((v for v in values if v.name not in unchanged), {batch: 1, seq: "tokens"})


def remove_unused(model: ir.Model) -> None:
    common.RemoveUnusedNodesPass()(model)
    for value in list(model.graph.inputs):
        if not value.uses():
            model.graph.inputs.remove(value)
