"""Trace the modules of an early exit (`exit_modules`) to the graphs that the runtime runs.

    exit_c    hidden → score [B, S] float32, hidden_out [B, S, H]      (only the outputs that the exit needs)
    score_c   hidden, logits [B, S, V] → score                         of a router that reads the head's logits

All of it is computed in float32, as in training, for every dtype of the model: the weights are small, and a threshold certified
for one dtype then holds for another. The score of an `MlpRouter` is a call of an ONNX function (`router_function`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import exit_graph, score_graph
from torch import Tensor, nn

from tide_export.graphs.cut import CutGraph
from tide_export.graphs.exit_modules import RMS_EPSILON, ExitModules, ExitTensors, MlpRouter
from tide_export.graphs.router_function import DOMAIN, INPUTS, NAME, VERSION, ones, router_function
from tide_export.passes.base import LoweringContext
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.graph_walk import array_initializer
from tide_export.trace.trace_model import export_module

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def exit_graph_model(info: ExitInfo, tensors: ExitTensors, hidden_size: int, dtype: str) -> CutGraph:
    """The graph of ``info.graph_outputs()`` from ``hidden`` [B, S, H] in ``dtype``. ``tensors``: see `ExitModules`."""
    step = _ExitStep(info, ExitModules.of(info, tensors, hidden_size), of_logits=False)
    return _traced(step, exit_graph(info), {"hidden": (hidden_size, dtype)}, info.graph_outputs())


def score_graph_model(info: ExitInfo, tensors: ExitTensors, hidden_size: int, vocab_size: int, dtype: str) -> CutGraph:
    """The graph of a router that reads the logits of the exit's head, which have the bundle's ``dtype`` too."""
    step = _ExitStep(info, ExitModules.of(info, tensors, hidden_size), of_logits=True)
    return _traced(step, score_graph(info), {"hidden": (hidden_size, dtype), "logits": (vocab_size, dtype)}, ("score",))


class _ExitStep(nn.Module):
    """The traced callable of either graph; the keys of its modules name the weights as in exits.safetensors."""

    def __init__(self, info: ExitInfo, modules: ExitModules, of_logits: bool) -> None:
        super().__init__()
        key = str(info.checkpoint)
        self.router = nn.ModuleDict({key: modules.router} if of_logits or info.has_mlp else {})
        self.translator = nn.ModuleDict({} if of_logits or modules.translator is None else {key: modules.translator})

    def forward(self, hidden: Tensor, logits: Tensor | None = None) -> list[Tensor]:
        scores = [_score(router, hidden, logits) for router in self.router.values()]
        return [*scores, *(translator(hidden.float()).to(hidden.dtype) for translator in self.translator.values())]


def _score(router: Any, hidden: Tensor, logits: Tensor | None) -> Tensor:
    if not isinstance(router, MlpRouter):
        wide = None if logits is None else logits.float()
        return router.scores(hidden.float(), wide, None if wide is None else wide.logsumexp(-1))
    inputs = (hidden, *(getattr(router, name) for name in INPUTS[1:]))
    attributes = {"epsilon": RMS_EPSILON}
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{NAME}", inputs, attributes, dtype=torch.float32, shape=hidden.shape[:-1], version=VERSION
    )


def _traced(step: nn.Module, name: str, inputs: dict[str, tuple[int, str]], outputs: tuple[str, ...]) -> CutGraph:
    """``step`` as the graph ``name``; ``inputs``: name → size of the last axis and dtype of a tensor [B, S, size]."""
    dim = torch.export.Dim
    dynamic = {0: dim("batch", min=1, max=4096), 1: dim("seq", min=1, max=1 << 20)}
    args = tuple(torch.zeros(2, 5, size, dtype=_DTYPES[dtype]) for size, dtype in inputs.values())
    model = export_module(step, args, (dynamic,) * len(args), step)
    graph = model.graph
    graph.name = name
    for value, known in zip([*graph.inputs, *graph.outputs], [*inputs, *outputs], strict=True):
        value.name = known
    call = next((node for node in graph if node.domain == DOMAIN), None)
    if call is not None:
        function = router_function()
        model.functions[function.identifier()] = function
    _shorten_ones(graph, call)
    fold_weights(model, LoweringContext(max_seq_len=0))
    return CutGraph(name, model)


def _shorten_ones(graph: ir.Graph, call: ir.Node | None) -> None:
    """Give norms without weight ones [H]: torch gives the shape of the states. Beside a router's ``call`` they are computed as
    in its function, so that ONNX Runtime merges the two equal norms."""
    for node in list(graph):
        made = node.inputs[1].producer() if node.op_type == "RMSNormalization" else None
        if made is None or made.op_type != "ConstantOfShape":
            continue
        if call is None:
            size = node.inputs[0].shape[-1]
            weight = array_initializer(graph, f"{node.outputs[0].name}.ones", np.ones(size, np.float32))
        else:
            tape = Tape()
            weight = ones(tape, call.inputs[1])
            graph.insert_before(node, tape.nodes)
        node.replace_input_with(1, weight)
        attributes = sorted(node.attributes.items())  # in the function's order: ONNX Runtime merges no nodes of different ones
        node.attributes.clear()
        node.attributes.update(attributes)
