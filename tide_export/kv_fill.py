"""Cut out what fills the caches of skipped layers: for each exit, the keys and values of the layers behind it, projected
from the state that the exit stopped with (state propagation: CALM, Schuster et al. 2022, arXiv:2207.07061, section 3.2).

    kv_fill_c   hidden, position_ids, write_index, key_cache_i, value_cache_i … → key_cache_out_i, value_cache_out_i …

``i`` runs over the layers from checkpoint c to the tail that the exit's head has run itself, or to the last one. Attention,
MLPs and queries are not in it: a layer costs its norm and two products.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import kv_fill_graph

from tide_export.cut import CutGraph, boundary_nodes, sort_initializers
from tide_export.trace import TracedModel


def cut_kv_fill(traced: TracedModel, exit: ExitInfo) -> CutGraph:
    """The graph of ``exit``, from a prepared model whose boundaries are all there; the model stays as it is."""
    model, end = traced.model.clone(), traced.num_layers - exit.tail_layers
    graph = model.graph
    marks = boundary_nodes(graph)
    hidden = marks[exit.checkpoint].outputs[0]
    for layer in range(exit.checkpoint + 1, end):
        ir.convenience.replace_all_uses_with(marks[layer].outputs[0], hidden)
    values = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    caches = [f"{kind}_cache{{}}_{layer}" for layer in range(exit.checkpoint, end) for kind in ("key", "value")]
    inputs = [hidden, values["position_ids"], values["write_index"], *(values[name.format("")] for name in caches)]
    piece = ir.convenience.extract(graph, inputs, [values[name.format("_out")] for name in caches])
    piece.name, piece.inputs[0].name = kv_fill_graph(exit), "hidden"
    filled = ir.Model(piece, ir_version=model.ir_version)
    common.ClearMetadataAndDocStringPass()(filled)
    sort_initializers(piece)
    return CutGraph(piece.name, filled)
