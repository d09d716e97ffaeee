"""Build the graph of an early exit: the router's score, the translated hidden state, or both.

    exit_c  hidden → score [B, S] float32, hidden_out [B, S, H]      (only the outputs that the exit needs)

    n          = rmsnorm(hidden), no weight, epsilon 1e-6
    score      = sigmoid(router.up · silu(router.down · n + router.down_bias) + router.up_bias)
    hidden_out = hidden + translator.up · translator.down · n        (tuned lens: Belrose et al. 2023, arXiv:2303.08112)

All of it is computed in float32, as in training, for every dtype of the model: the weights are small, and a threshold certified
for one dtype then holds for another. The score is a call of an ONNX function (`router_function`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import exit_graph

from tide_export.graphs.cut import CutGraph
from tide_export.graphs.router_function import DOMAIN, VERSION, call_router, cast, ones, rms_norm, router_function
from tide_export.trace.trace_model import OPSET

RMS_EPSILON = 1e-6
IR_VERSION = 10  # of the traced graphs
_DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_TENSORS = {
    "score": [("router", name) for name in ("down", "down_bias", "up", "up_bias")],
    "hidden_out": [("translator", name) for name in ("down", "up")],
}
ExitTensors = Mapping[str, NDArray[np.float32]]


def exit_tensor_names(info: ExitInfo) -> list[str]:
    """Names of the tensors in exits.safetensors that an exit's graph reads."""
    return [f"{part}.{info.checkpoint}.{name}" for output in info.graph_outputs() for part, name in _TENSORS[output]]


def exit_graph_model(info: ExitInfo, tensors: ExitTensors, hidden_size: int, dtype: str) -> CutGraph:
    """The graph of ``info.graph_outputs()`` from ``hidden`` [B, S, H] in the bundle's ``dtype``.

    ``tensors``: at least those of `exit_tensor_names`; router down [R, H], down_bias [R], up [R], up_bias [1], translator
    down [rank, H], up [H, rank]; float32.
    """
    stored = _DTYPES[dtype]
    name = exit_graph(info)
    tokens, states = ("batch", "seq"), ("batch", "seq", hidden_size)
    hidden = ir.val("hidden", dtype=stored, shape=states)
    early_exit = _ExitTape(info.checkpoint, tensors)
    wide = cast(early_exit.tape, hidden, ir.DataType.FLOAT)
    outputs = []
    functions = []
    opsets = {"": OPSET}
    if "score" in info.graph_outputs():
        outputs.append(_named(early_exit.score(hidden), "score", ir.DataType.FLOAT, tokens))
        functions = [router_function()]
        opsets = {"": OPSET, DOMAIN: VERSION}
    if "hidden_out" in info.graph_outputs():
        outputs.append(_named(cast(early_exit.tape, early_exit.translated(wide), stored), "hidden_out", stored, states))
    tape = early_exit.tape
    graph = ir.Graph([hidden], outputs, nodes=tape.nodes, initializers=tape.initializers, opset_imports=opsets, name=name)
    return CutGraph(name, ir.Model(graph, ir_version=IR_VERSION, functions=functions))


class _ExitTape:
    """The formulas of one exit, recorded as nodes and initializers on ``tape``."""

    def __init__(self, checkpoint: int, tensors: ExitTensors) -> None:
        self.tape = Tape()
        self.checkpoint = checkpoint
        self.tensors = tensors

    def score(self, states: ir.Value) -> ir.Value:
        weights = [self._weight("router", name) for name in ("down", "down_bias", "up", "up_bias")]
        return call_router(self.tape, [states, *weights], RMS_EPSILON)

    def translated(self, states: ir.Value) -> ir.Value:
        normed = rms_norm(self.tape, states, self._ones(), RMS_EPSILON)
        down = self.tape.op("MatMul", [normed, self._transposed("translator", "down")])
        total = self.tape.op("Add", [states, self.tape.op("MatMul", [down, self._transposed("translator", "up")])])
        total.dtype = ir.DataType.FLOAT
        return total

    def _ones(self) -> ir.Value:
        """Computed as in the router, if there is one, so that ONNX Runtime merges the two equal norms."""
        router = self._recorded(f"router.{self.checkpoint}.down")
        if router is not None:
            return ones(self.tape, router, axis=1)
        return ones(self.tape, self._transposed("translator", "down"), axis=0)

    def _weight(self, part: str, name: str) -> ir.Value:
        full_name = f"{part}.{self.checkpoint}.{name}"
        return self._initializer(full_name, self.tensors[full_name])

    def _transposed(self, part: str, name: str) -> ir.Value:
        """A matrix [out, in] transposed to [in, out], MatMul's right operand."""
        full_name = f"{part}.{self.checkpoint}.{name}"
        return self._initializer(f"{full_name}.T", self.tensors[full_name].T)

    def _initializer(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        recorded = self._recorded(name)
        return recorded if recorded is not None else self.tape.initializer(ir.tensor(np.ascontiguousarray(array), name=name))

    def _recorded(self, name: str) -> ir.Value | None:
        return next((value for value in self.tape.initializers if value.name == name), None)


def _named(value: ir.Value, name: str, dtype: ir.DataType, shape: tuple[int | str, ...]) -> ir.Value:
    value.name = name
    value.dtype = dtype
    value.shape = ir.Shape(shape)
    return value
