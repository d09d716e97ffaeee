"""Run the graphs of a bundle's target cpu on whole texts, in sessions that the caller opens and drops one at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx.external_data_helper import uses_external_data
from tide_runtime.backends.graph_contract import written_name
from tide_runtime.backends.onnxruntime.invariance import MIN_PADDING
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.backends.step_arrays import StepPositions, StepShape
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import VerificationError

from tide_export.passes.attention_packed import is_kept

_DENSE_BYTES = 1 << 29  # fp32 bytes of a matrix, above which an exact session has it in parts
FP32_ACTIVATIONS = 1  # accuracy_level of MatMulNBits and QMoE
_DTYPES: dict[str, type[np.generic]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


def open_session(file: Path, exact: bool = False) -> ort.InferenceSession:
    """A session of the graph in ``file``.

    ``exact``: products with low-bit weights do not round their activations to int8. Nor are weights packed, which takes as much
    memory as they do: the session serves one pass. A product then makes its matrix in fp32; a large one, such as the head, some
    rows at a time.

    Raises VerificationError if ONNX Runtime refuses the graph.
    """
    model = onnx.load(file, load_external_data=False)
    if exact:
        _without_rounding(model.graph)
        _in_row_parts(model.graph)
    for node in model.graph.node:
        for attribute in node.attribute:
            if exact and node.op_type in ("MatMulNBits", "QMoE") and attribute.name == "accuracy_level":
                attribute.i = FP32_ACTIVATIONS
    options = session_options(ThreadOptions(), chained=True)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent))
    if exact:
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises unrelated exception classes
        raise VerificationError(f"ONNX Runtime {ort.__version__} cannot load {file.name} ({error})") from error


def _without_rounding(graph: onnx.GraphProto) -> None:
    """Products of integers (tide_export's pass integer_products) read what would be rounded, and their matrix in fp32."""
    made_by = {node.output[0]: node for node in graph.node}
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        product = made_by.get(node.input[0]) if node.op_type == "Mul" else None
        if product is not None and product.op_type == "MatMulIntegerToFloat":
            integers, matrix, _, scales, *_ = product.input
            share = made_by[made_by[integers].input[0]]
            dense = f"{product.output[0]}.dense"
            nodes.append(onnx.helper.make_node("DequantizeLinear", [matrix, scales], [dense], axis=1))
            node = onnx.helper.make_node("MatMul", [share.input[0], dense], [node.output[0]])
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _in_row_parts(graph: onnx.GraphProto) -> None:
    """Each MatMulNBits whose matrix has more than `_DENSE_BYTES` in fp32 becomes several of some of its rows each."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        sizes = {one.name: one.i for one in node.attribute}
        rows = sizes.get("N", 0)
        count = -(-4 * rows * sizes.get("K", 0) // _DENSE_BYTES)
        read = [weights.get(name) for name in node.input[1:] if name]
        if node.op_type != "MatMulNBits" or count < 2 or not all(_can_split(tensor, rows) for tensor in read):
            nodes.append(node)
            continue
        step = -(-rows // count)
        parts = [_rows_of(node, weights, graph, first, min(step, rows - first)) for first in range(0, rows, step)]
        nodes += [*parts, onnx.helper.make_node("Concat", [part.output[0] for part in parts], node.output, axis=-1)]
    del graph.node[:]
    graph.node.extend(nodes)


def _can_split(tensor: onnx.TensorProto | None, rows: int) -> bool:
    return tensor is not None and uses_external_data(tensor) and math.prod(tensor.dims) % rows == 0


def _rows_of(
    node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], graph: onnx.GraphProto, first: int, count: int
) -> onnx.NodeProto:
    """The product ``node`` with ``count`` rows of its matrix from ``first`` on, whose parts are added to the graph's weights."""
    part = onnx.NodeProto()
    part.CopyFrom(node)
    part.name = part.output[0] = f"{node.output[0]}.{first}"
    for attribute in part.attribute:
        if attribute.name == "N":
            rows = attribute.i
            attribute.i = count
    for number, name in enumerate(node.input[1:], 1):
        if name:
            part.input[number] = f"{name}.{first}"
            tensor = graph.initializer.add()
            tensor.CopyFrom(weights[name])
            tensor.name = part.input[number]
            tensor.dims[0] = tensor.dims[0] // rows * count
            place = {entry.key: entry for entry in tensor.external_data}
            size = int(place["length"].value) // rows
            place["offset"].value = str(int(place["offset"].value) + first * size)
            place["length"].value = str(count * size)
    return part


class TextPass:
    """Runs graphs on ``texts`` from empty caches and states of zero; their T tokens are packed one text after the other.

    Args:
        decoded: that many tokens at the end of each text run one by one, after a pass over the others.
        offsets: by how much the position ids of each text exceed its tokens' places; empty: nothing.
    """

    def __init__(self, manifest: Manifest, texts: Sequence[Sequence[int]], decoded: int = 0, offsets: Sequence[int] = ()) -> None:
        self._texts = [np.asarray(text, np.int64) for text in texts]
        lengths = np.array([len(text) for text in texts])
        first = lengths - decoded
        starts = np.cumsum(lengths) - lengths
        self._tokens = int(lengths.sum())
        self._steps = [_Step(first, np.zeros_like(lengths), starts, offsets)]
        self._steps += [_Step(np.ones_like(lengths), first + n, starts, offsets) for n in range(decoded)]
        self._slots = int(lengths.max()) + MIN_PADDING.sequence.max_added

    def run(
        self, session: ort.InferenceSession, states: NDArray[np.float32] | None = None, output: str | None = None
    ) -> NDArray[np.float32]:
        """What a graph makes of ``states`` [T, H], or of the token ids: states [T, H], or logits [T, V]; or its ``output`` of the
        tokens with logits, which are all."""
        ids = np.concatenate(self._texts)
        caches: dict[str, NDArray[Any]] = {}
        for value in session.get_inputs():
            if is_kept(value):
                sizes = [size if isinstance(size, int) else self._slots for size in value.shape[1:]]
                caches[value.name] = np.zeros((len(self._texts), *sizes), _DTYPES[value.type])
        names = [value.name for value in session.get_outputs()]
        packed: NDArray[np.float32] | None = None
        for step in self._steps:
            feeds = step.feeds(session, ids, states) | caches
            outputs = dict(zip(names, session.run(names, feeds), strict=True))
            caches = {name: outputs[written_name(name)] for name in caches}
            result = outputs.pop(output or ("hidden_out" if "hidden_out" in outputs else "logits"))
            rows = result[0, : len(step.rows)].reshape(len(step.rows), -1)
            if packed is None:
                packed = np.empty((self._tokens, rows.shape[1]), np.float32)
            packed[step.rows] = rows
        assert packed is not None
        return packed


class _Step:
    """A launch of ``counts[b]`` tokens of each text, which follow ``cached[b]``. ``starts``: of the texts among all tokens."""

    def __init__(
        self, counts: NDArray[np.int64], cached: NDArray[np.int64], starts: NDArray[np.int64], offsets: Sequence[int]
    ) -> None:
        wanted = counts.tolist()
        self._shape = StepShape.of(0, wanted, wanted, MIN_PADDING)
        positions = StepPositions(self._shape, MIN_PADDING.sequence)
        positions.arrange(wanted, wanted)
        positions.place(cached.tolist(), offsets)
        self._positions = {**positions.arrays, "position_ids": positions.arrays["position_ids"][None]}
        begins = (starts + cached).tolist()
        self.rows = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(begins, wanted, strict=True)])

    def feeds(
        self, session: ort.InferenceSession, ids: NDArray[np.int64], states: NDArray[np.float32] | None
    ) -> dict[str, NDArray[Any]]:
        """The graph's inputs, without caches."""
        feeds: dict[str, NDArray[Any]] = {}
        for value in session.get_inputs():
            if value.name in ("hidden", "before"):
                read = states[self.rows] if states is not None else np.zeros((len(self.rows), value.shape[-1]))
                feeds[value.name] = self._padded(read.astype(_DTYPES[value.type]))
            elif value.name == "first_loop":
                feeds["first_loop"] = np.full((1, self._shape.tokens, 1), states is None)
            elif value.name == "input_ids":
                feeds["input_ids"] = self._padded(ids[self.rows])
            elif not is_kept(value):
                feeds[value.name] = self._positions[value.name]
        return feeds

    def _padded(self, rows: NDArray[Any]) -> NDArray[Any]:
        """[1, T, …], with rows of zeros for the padding of the launch."""
        return np.concatenate([rows, np.zeros((self._shape.tokens - len(rows), *rows.shape[1:]), rows.dtype)])[None]
