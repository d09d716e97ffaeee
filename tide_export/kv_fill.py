"""Cut out the graph that fills the KV caches of the layers an exit skips: keys and values projected from the exit's hidden
state (state propagation: CALM, Schuster et al. 2022, arXiv:2207.07061, section 3.2).

    kv_fill_c   hidden, position_ids, write_index, key_cache_i, value_cache_i … → key_cache_out_i, value_cache_out_i …

``i`` runs over the layers from checkpoint c to the last one, or to the tail that the exit's head runs itself. The graph has no
attention, MLPs or queries: a layer costs its norm and two products.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import kv_fill_graph

from tide_export.cut import CutGraph, boundary_nodes, sort_initializers
from tide_export.trace import TracedModel


def cut_kv_fill(traced: TracedModel, early_exit: ExitInfo) -> CutGraph:
    """The graph of ``early_exit``, cut from a copy of a prepared model with all its boundaries."""
    model, end = traced.model.clone(), traced.num_layers - early_exit.tail_layers
    graph = model.graph
    boundaries = boundary_nodes(graph)
    hidden = boundaries[early_exit.checkpoint].outputs[0]
    for layer in range(early_exit.checkpoint + 1, end):
        ir.convenience.replace_all_uses_with(boundaries[layer].outputs[0], hidden)
    values = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    caches = [f"{kind}_cache{{}}_{layer}" for layer in range(early_exit.checkpoint, end) for kind in ("key", "value")]
    inputs = [hidden, values["position_ids"], values["write_index"], *(values[name.format("")] for name in caches)]
    piece = ir.convenience.extract(graph, inputs, [values[name.format("_out")] for name in caches])
    piece.name, piece.inputs[0].name = kv_fill_graph(early_exit), "hidden"
    filled = ir.Model(piece, ir_version=model.ir_version)
    common.ClearMetadataAndDocStringPass()(filled)
    sort_initializers(piece)
    return CutGraph(piece.name, filled)
