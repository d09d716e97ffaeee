"""Build the graph of an early exit: the router's score, the translated hidden state, or both.

    exit_c  hidden → score [B, S] float32, hidden_out [B, S, H]      (only those that the exit needs)

    n          = rmsnorm(hidden), no weight, epsilon 1e-6
    score      = sigmoid(router.up · silu(router.down · n + router.down_bias) + router.up_bias)
    hidden_out = hidden + translator.up · translator.down · n        (tuned lens: Belrose et al. 2023, arXiv:2303.08112)

Everything is computed in float32, as it was trained, whatever the model's dtype: the weights are small, and a threshold
certified for one dtype then means the same in another.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from tide_runtime.calibration import ExitInfo
from tide_runtime.manifest import exit_graph

from tide_export.cut import CutGraph
from tide_export.trace import OPSET

RMS_EPSILON = 1e-6
IR_VERSION = 10  # of the traced graphs
_DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_TENSORS = {
    "score": [("router", name) for name in ("down", "down_bias", "up", "up_bias")],
    "hidden_out": [("translator", name) for name in ("down", "up")],
}
ExitTensors = Mapping[str, NDArray[np.float32]]


def exit_tensor_names(info: ExitInfo) -> list[str]:
    """The tensors of exits.safetensors that an exit's graph is made from."""
    return [f"{part}.{info.checkpoint}.{name}" for output in info.graph_outputs() for part, name in _TENSORS[output]]


def exit_graph_model(info: ExitInfo, tensors: ExitTensors, hidden_size: int, dtype: str) -> CutGraph:
    """The graph of ``info.graph_outputs()`` from ``hidden`` [B, S, H] in the bundle's ``dtype``.

    ``tensors``: at least those of `exit_tensor_names`; router down [R, H], down_bias [R], up [R], up_bias [1], translator
    down [rank, H], up [H, rank]; float32.
    """
    stored, name = _DTYPES[dtype], exit_graph(info)
    tokens, states = ("batch", "seq"), ("batch", "seq", hidden_size)
    hidden = ir.val("hidden", dtype=stored, shape=states)
    exit_ = _ExitTape(info.checkpoint, tensors)
    wide = exit_.cast(hidden, ir.DataType.FLOAT)
    normed = exit_.norm(wide, hidden_size)
    outputs = []
    if "score" in info.graph_outputs():
        outputs.append(_named(exit_.score(normed), "score", ir.DataType.FLOAT, tokens))
    if "hidden_out" in info.graph_outputs():
        outputs.append(_named(exit_.cast(exit_.translated(wide, normed), stored), "hidden_out", stored, states))
    tape = exit_.tape
    graph = ir.Graph([hidden], outputs, nodes=tape.nodes, initializers=tape.initializers, opset_imports={"": OPSET}, name=name)
    return CutGraph(name, ir.Model(graph, ir_version=IR_VERSION))


class _ExitTape:
    """The formulas of one exit, recorded as nodes and initializers on ``tape``."""

    def __init__(self, checkpoint: int, tensors: ExitTensors) -> None:
        self.tape, self.checkpoint, self.tensors = Tape(), checkpoint, tensors

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        cast = self.tape.op("Cast", [value], {"to": dtype})
        cast.dtype = dtype
        return cast

    def norm(self, states: ir.Value, size: int) -> ir.Value:
        ones = self._initializer("norm.ones", np.ones(size, np.float32))  # the operator wants a weight, exits have none
        return self.tape.op("RMSNormalization", [states, ones], {"axis": -1, "epsilon": RMS_EPSILON, "stash_type": 1})

    def score(self, normed: ir.Value) -> ir.Value:
        down = self.tape.op("Add", [self._product(normed, "router", "down"), self._weight("router", "down_bias")])
        silu = self.tape.op("Mul", [down, self.tape.op("Sigmoid", [down])])
        up = self.tape.op("MatMul", [silu, self._weight("router", "up")])  # [B, S, R] · [R]
        return self.tape.op("Sigmoid", [self.tape.op("Add", [up, self._weight("router", "up_bias")])])

    def translated(self, states: ir.Value, normed: ir.Value) -> ir.Value:
        down = self._product(normed, "translator", "down")
        total = self.tape.op("Add", [states, self._product(down, "translator", "up")])
        total.dtype = ir.DataType.FLOAT
        return total

    def _product(self, value: ir.Value, part: str, name: str) -> ir.Value:
        """``value`` [B, S, in] times the matrix [out, in], which MatMul takes transposed."""
        full_name = f"{part}.{self.checkpoint}.{name}"
        return self.tape.op("MatMul", [value, self._initializer(f"{full_name}.T", self.tensors[full_name].T)])

    def _weight(self, part: str, name: str) -> ir.Value:
        full_name = f"{part}.{self.checkpoint}.{name}"
        return self._initializer(full_name, self.tensors[full_name])

    def _initializer(self, name: str, array: NDArray[np.float32]) -> ir.Value:
        return self.tape.initializer(ir.tensor(np.ascontiguousarray(array), name=name))


def _named(value: ir.Value, name: str, dtype: ir.DataType, shape: tuple[int | str, ...]) -> ir.Value:
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    return value
