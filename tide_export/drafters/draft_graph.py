"""Trace a drafter (`tide_export.drafters.base`), and make its graph of the trace.

    draft   input_ids, before [1, T, D], key_cache_L, value_cache_L, positions as in a segment, logits_index [N]
            → token [1, N] int64, score [1, N] float32, states [1, N, D], key_cache_out_L, value_cache_out_L

``before``: of each token before ``input_ids`` its state of the graph of all layers (`cut.TappedStates`), or that of the guess
before. The pair of both goes into the slot of the earlier token. L, the number of the model's layers, is that of the drafter's:
its cache is one more layer's. ``token`` is the likeliest of the drafter's vocabulary, ``score`` its probability, for those pairs
only that ``logits_index`` counts: what comes after the attention is not computed for the others. A drafter without attention has
neither caches nor ``logits_index``, and N = T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from onnx_ir.tape import Tape
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.bundle.manifest import DRAFT, STATES, KVInfo
from tide_runtime.errors import UnsupportedModelError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tide_export.drafters.base import Drafter
from tide_export.drafters.rounded import FuseStep, RoundedDrafter
from tide_export.graphs.cut import CutGraph, at_logits_index, boundary_nodes, dependents, numbered, sort_initializers
from tide_export.model.traced_attention import KEY_VALUES, TracedLayer, tide_layer
from tide_export.passes.attention_packed import rename_packed_dims
from tide_export.passes.graph_walk import array_initializer, rename_dims, splice
from tide_export.trace.trace_model import TracedModel, export_module
from tide_export.weights.quantized_weight import QuantizedWeight

_EMBEDDED = "embedded"


@dataclass(frozen=True)
class TracedDrafter:
    """What torch traced of a drafter.

    Args:
        fuse: ``tapped`` → ``states``.
        step: the graph ``draft``, not lowered, from ``embedded`` in place of ``input_ids`` where it shares the model's embedding.
        weights: parameter → its low-bit form.
    """

    taps: tuple[int, ...]
    kv: KVInfo | None
    fuse: ir.Model
    step: ir.Model
    weights: Mapping[str, QuantizedWeight]


class _DraftStep(nn.Module):
    """The traced callable: pairs of one step over explicit caches."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.model = drafter

    def forward(self, position_ids, given, before, write_index, kept):
        drafter = self.model
        layer = TracedLayer(dict(zip(KEY_VALUES, kept, strict=False)), write_index)
        embedded = given if drafter.shares_embedding else drafter.embedded(given)
        with tide_layer(drafter.config):
            logits, states = drafter(embedded, before, position_ids, Cache(layers=[layer]) if kept else None)
        if layer.kv != drafter.kv:
            raise UnsupportedModelError(
                f"{type(drafter).__name__} is not supported, because its attention keeps {layer.kv}, and not {drafter.kv}"
            )
        token = drafter.vocabulary[logits.argmax(-1)]
        score = logits.float().softmax(-1).amax(-1)
        return token, score, states.to(before.dtype), [layer.caches_out[name] for name in KEY_VALUES] if kept else []


def trace_drafter(rounded: RoundedDrafter, model: PreTrainedModel, num_layers: int) -> TracedDrafter:
    """Trace the drafter of ``model``, which keeps its pairs in a cache behind those of ``num_layers`` layers.

    Raises UnsupportedModelError if torch cannot export its code, or its attention is none of transformers'.
    """
    drafter = rounded.drafter
    hidden = int(model.config.get_text_config().hidden_size)
    batch, seq, slots = 2, 5, 16
    dim = torch.export.Dim
    b, s, t = dim("batch", min=1, max=4096), dim("seq", min=1, max=1 << 20), dim("slots", min=1, max=1 << 20)
    tokens = {0: b, 1: s}
    kv = drafter.kv

    def states(width: int) -> Tensor:
        return torch.zeros(batch, seq, width, dtype=model.dtype)

    fuse = export_module(FuseStep(drafter), (states(len(drafter.taps) * hidden),), (tokens,), drafter)
    _name(fuse.graph, ["tapped"], [STATES])
    positions = torch.arange(seq).expand(batch, seq).contiguous()
    given = states(hidden) if drafter.shares_embedding else positions
    widths = [kv.key_dim, kv.value_dim] if kv is not None else []
    caches = [torch.zeros(batch, kv.heads, slots, width, dtype=model.dtype) for width in widths] if kv is not None else []
    args = (positions, given, states(drafter.width), torch.zeros(batch, dtype=torch.long), caches)
    step = export_module(_DraftStep(drafter), args, (tokens, tokens, tokens, {0: b}, [{0: b, 2: t} for _ in caches]), drafter)
    names = [numbered(name, num_layers) for name in KEY_VALUES if caches]
    source = _EMBEDDED if drafter.shares_embedding else "input_ids"
    written = map(written_name, names)
    _name(step.graph, ["position_ids", source, "before", "write_index", *names], ["token", "score", STATES, *written])
    return TracedDrafter(drafter.taps, kv, fuse, step, rounded.weights)


def _name(graph: ir.Graph, inputs: list[str], outputs: list[str]) -> None:
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(list(values), names, strict=True):
            value.name = name


def join_embedding(step: ir.Model, traced: TracedModel) -> None:
    """Put the model's own embedding, with all that its code does before layer 0, before a drafter's step that shares it.

    ``traced``: the prepared model. Raises UnsupportedModelError if its layer 0 needs more than token ids and positions.
    """
    graph = step.graph
    given = next((value for value in graph.inputs if value.name == _EMBEDDED), None)
    if given is None:
        return
    source = traced.model.clone().graph
    inputs = {value.name: value for value in source.inputs}
    embedded = boundary_nodes(source)[0].inputs[0]
    assert embedded is not None
    try:
        piece = ir.convenience.extract(source, [inputs["input_ids"], inputs["position_ids"]], [embedded])
    except ValueError as error:
        raise UnsupportedModelError(f"the embedding cannot be cut out of the model for the draft head ({error})") from error
    model = ir.Model(piece, ir_version=step.ir_version)
    common.RemoveUnusedNodesPass()(model)
    tape = Tape()
    ids = ir.val("input_ids", dtype=ir.DataType.INT64, shape=given.shape[:2])
    positions = next(value for value in graph.inputs if value.name == "position_ids")
    one = array_initializer(graph, "embedding.one", np.array(1, np.int64))
    following = tape.op("Add", [positions, one])  # a pair has the position of its earlier token, and embeds the later one
    first = graph[0]
    graph.insert_before(first, tape.nodes)
    [joined] = splice(step, model, "embedding", [ids, following], before=first)
    ir.convenience.replace_all_uses_with(given, joined)
    graph.inputs[list(graph.inputs).index(given)] = ids
    common.RemoveUnusedNodesPass()(step)


def keep_wanted(step: ir.Model) -> None:
    """Compute what comes after the attention for the tokens at ``logits_index`` only; in place, before attention is packed."""
    graph = step.graph
    attention = next((node for node in graph if node.op_type == "GroupQueryAttention"), None)
    if attention is None:
        return
    graph.inputs.append(ir.val("logits_index", dtype=ir.DataType.INT64, shape=["wanted"]))
    batch, seq = next(value for value in graph.inputs if value.name == "before").shape[:2]
    attended = attention.outputs[0]
    after = {*dependents(attended)} - {attended}
    chosen: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if any(output in after for output in node.outputs)]:
        for index, value in enumerate(node.inputs):
            if value is None or value.const_value is not None or value in after:
                continue
            if value not in chosen:
                if value.shape is None or len(value.shape) != 3 or list(value.shape[:2]) != [batch, seq]:
                    raise UnsupportedModelError(
                        f"the drafter is not supported, because what follows its attention reads {value.name} of shape "
                        f"{value.shape}, and not one row for each token"
                    )
                tape = Tape()
                chosen[value] = at_logits_index(graph, tape, value)
                graph.insert_before(node, tape.nodes)
            node.replace_input_with(index, chosen[value])
    rename_dims([*after, *chosen.values()], {batch: 1, seq: "wanted"})


def finished(step: ir.Model) -> CutGraph:
    """The lowered graph, ready to write."""
    if not any("_cache_" in (value.name or "") for value in step.graph.inputs):
        rename_packed_dims(step.graph)
    step.graph.name = DRAFT
    common.ClearMetadataAndDocStringPass()(step)
    sort_initializers(step.graph)
    return CutGraph(DRAFT, step)
