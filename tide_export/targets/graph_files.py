"""Write a lowered graph and its weights to files, from which a compiler builds an engine."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from tide_runtime.bundle import sha256_of

from tide_export.graphs.cut import CutGraph
from tide_export.weights.weight_file import WeightFile


@dataclass(frozen=True)
class GraphFile:
    """A written graph.

    Args:
        digest: SHA-256 over graph and weights.
        operators: operator → number of nodes.
        dims: name → shape of the inputs, then of the outputs; symbolic dimensions by name.
        inputs: number of inputs.
    """

    name: str
    path: Path
    digest: str
    operators: Counter[str]
    dims: dict[str, list[int | str]]
    inputs: int


def write_graph_file(graph: CutGraph, folder: Path) -> GraphFile:
    """Write ``graph`` and its weights into ``folder``; a parser finds the weights in the graph's folder."""
    path = folder / f"{graph.name}.onnx"
    model = graph.model.clone()
    with WeightFile(folder / f"{graph.name}.weights") as weights:
        weights.externalise(model)
    ir.save(model, path)
    digest = hashlib.sha256(bytes.fromhex(sha256_of(path)) + weights.digest.digest()).hexdigest()
    values = (*model.graph.inputs, *model.graph.outputs)
    dims = {value.name: [d if isinstance(d, int) else str(d.value) for d in value.shape] for value in values}
    return GraphFile(graph.name, path, digest, Counter(node.op_type for node in model.graph), dims, len(model.graph.inputs))
