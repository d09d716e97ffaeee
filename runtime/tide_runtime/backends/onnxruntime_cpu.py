"""ONNX Runtime on the CPU: one session per graph, everything bound once per shape, caches updated in place.

GroupQueryAttention refuses several rows with several tokens each over a filled cache; ``_RowByRow`` runs such a step one
row at a time on views of the same buffers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.base import Step
from tide_runtime.backends.interface import check_interface, hidden_states
from tide_runtime.backends.threads import ThreadOptions, session_options
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError
from tide_runtime.manifest import GraphInfo, Manifest

_NUMPY_DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16}
_ORT_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
_KEPT_STEPS = 32  # shapes whose bindings are kept per Slots; decode uses a handful, prefill many


class OnnxRuntimeBackend:
    """The ``cpu`` target. Sessions are safe to run from several threads; each caller takes its own ``Slots``."""

    name = "onnxruntime-cpu"

    def __init__(self, manifest: Manifest, sessions: dict[str, ort.InferenceSession], layers: dict[str, int]) -> None:
        """``sessions`` and ``layers``: the session of each graph, and how many decoder layers it runs."""
        self.manifest, self.sessions, self.layers = manifest, sessions, layers
        self.launches: dict[str, int] = Counter()
        self.dtype = _NUMPY_DTYPES[manifest.dtype]
        outputs = {value.name: value for session in sessions.values() for value in session.get_outputs()}
        self.logits_dtype = _ORT_DTYPES[outputs["logits"].type]

    @classmethod
    def load(cls, bundle: Bundle, target: str, threads: ThreadOptions) -> OnnxRuntimeBackend:
        """Load the graphs of ``target``. Raises BundleError when ONNX Runtime refuses one or it breaks the contract."""
        options, files = session_options(threads), bundle.manifest.targets[target].graphs
        sessions = {g.name: _load(bundle, g, files[g.name], options) for g in bundle.manifest.graphs}
        layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in bundle.manifest.graphs}
        return cls(bundle.manifest, sessions, layers)

    def slots(self, capacity: int) -> OnnxRuntimeSlots:
        return OnnxRuntimeSlots(self, capacity)


class OnnxRuntimeSlots:
    """KV caches in host memory. Untouched pages cost nothing: the operating system backs them when first written."""

    def __init__(self, backend: OnnxRuntimeBackend, capacity: int) -> None:
        self.backend, self.capacity, self.layers_launched = backend, capacity, 0
        manifest = backend.manifest
        self.caches: dict[str, NDArray[np.generic]] = {}
        for layer, kv in enumerate(manifest.kv):
            for kind, width in (("key", kv.key_dim), ("value", kv.value_dim)):
                shape = (capacity, kv.heads, manifest.max_seq_len, width)
                self.caches[f"{kind}_cache_{layer}"] = np.zeros(shape, backend.dtype)
        self._steps: OrderedDict[tuple[int, int, int], Step] = OrderedDict()

    def step(self, first_row: int, rows: int, seq: int) -> Step:
        key = (first_row, rows, seq)
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        buffers = _Buffers(self.backend, rows, seq)
        step: Step = _BoundStep(self, buffers, first_row)
        if rows > 1 and seq > 1:
            step = _RowByRow(step, [_BoundStep(self, buffers.row(r), first_row + r) for r in range(rows)])
        self._steps[key] = step
        if len(self._steps) > _KEPT_STEPS:
            self._steps.popitem(last=False)
        return step

    def count(self, graph: str) -> None:
        """Note one launch of ``graph``: the only place where launches are counted."""
        self.backend.launches[graph] += 1
        self.layers_launched += self.backend.layers[graph]

    def move_row(self, source: int, target: int, length: int) -> None:
        for cache in self.caches.values():
            cache[target, :, :length] = cache[source, :, :length]


class _Buffers:
    """The arrays of one step shape; ``row`` gives views on one row."""

    def __init__(self, backend: OnnxRuntimeBackend, rows: int, seq: int) -> None:
        model, segments = backend.manifest.model, len(backend.manifest.segments)
        self.input_ids = np.zeros((rows, seq), np.int64)
        self.position_ids = np.zeros((rows, seq), np.int64)
        self.write_index = np.zeros(rows, np.int64)
        self.seqlens_k = np.zeros(rows, np.int32)
        self.total_sequence_length = np.zeros((), np.int32)
        self.hidden = [np.zeros((rows, seq, model.hidden_size), backend.dtype) for _ in range(segments)]
        # A long prefill asks for its last token's logits only, through a step of one token: nothing of [S, V] is touched.
        self.logits = np.zeros((rows, seq, model.vocab_size), backend.logits_dtype)
        self.token = np.zeros((rows, seq), np.int64)
        self.score = np.zeros((rows, seq), np.float32)

    def place(self, lengths: Sequence[int]) -> None:
        seq = self.input_ids.shape[1]
        self.seqlens_k[:] = [length + seq - 1 for length in lengths]
        self.total_sequence_length[()] = max(lengths) + seq
        self.write_index[:] = lengths
        if seq == 1:
            self.position_ids[:, 0] = self.write_index
        else:
            np.add(self.write_index[:, None], np.arange(seq), out=self.position_ids)

    def row(self, index: int) -> _Buffers:
        view = object.__new__(_Buffers)
        view.total_sequence_length = np.zeros((), np.int32)
        for name in ("input_ids", "position_ids", "write_index", "seqlens_k", "logits", "token"):
            setattr(view, name, getattr(self, name)[index : index + 1])
        view.hidden = [h[index : index + 1] for h in self.hidden]
        return view


class _BoundStep:
    """One IO binding per graph, made when the graph is first run."""

    def __init__(self, slots: OnnxRuntimeSlots, buffers: _Buffers, first_row: int) -> None:
        self.input_ids, self.hidden = buffers.input_ids, buffers.hidden
        self.logits, self.token, self.score = buffers.logits, buffers.token, buffers.score
        self._buffers, self._slots, self._first_row = buffers, slots, first_row
        self._runs: dict[str, Callable[[], None]] = {}

    def place(self, lengths: Sequence[int]) -> None:
        self._buffers.place(lengths)

    def run(self, graph: str) -> None:
        self._slots.count(graph)
        try:
            run = self._runs.get(graph)
            if run is None:
                run = self._runs[graph] = self._bind(graph)
            run()
        except Exception as error:  # ONNX Runtime raises RuntimeError and bare classes of its own
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {graph} ({error}); export the bundle again") from error

    def _bind(self, graph: str) -> Callable[[], None]:
        session = self._slots.backend.sessions[graph]
        reads, writes = hidden_states(self._slots.backend.manifest, graph)
        buffers = self._buffers
        arrays = {
            "input_ids": self.input_ids,
            "position_ids": buffers.position_ids,
            "write_index": buffers.write_index,
            "seqlens_k": buffers.seqlens_k,
            "total_sequence_length": buffers.total_sequence_length,
            "hidden": self.hidden[reads],
            "hidden_out": self.hidden[writes],
            "logits": self.logits,
            "token": self.token,
            "score": self.score,
        }
        rows = slice(self._first_row, self._first_row + len(self.input_ids))
        binding = session.io_binding()
        for value in session.get_inputs():
            array = self._slots.caches[value.name][rows] if "_cache_" in value.name else arrays[value.name]
            binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy(array))
        for value in session.get_outputs():
            in_place = value.name.replace("_cache_out_", "_cache_")
            array = self._slots.caches[in_place][rows] if in_place in self._slots.caches else arrays[value.name]
            binding.bind_ortvalue_output(value.name, ort.OrtValue.ortvalue_from_numpy(array))
        return lambda: session.run_with_iobinding(binding)


class _RowByRow:
    """A step of several rows and tokens: segments run row by row, the rest at once."""

    def __init__(self, whole: Step, rows: list[_BoundStep]) -> None:
        self.input_ids, self.hidden, self.logits, self.token = whole.input_ids, whole.hidden, whole.logits, whole.token
        self._whole, self._rows = whole, rows

    def place(self, lengths: Sequence[int]) -> None:
        self._whole.place(lengths)
        for row, length in zip(self._rows, lengths, strict=True):
            row.place([length])

    def run(self, graph: str) -> None:
        if not graph.startswith("segment"):
            self._whole.run(graph)
        else:
            for row in self._rows:
                row.run(graph)


def _load(bundle: Bundle, graph: GraphInfo, file: str, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        session = ort.InferenceSession(str(bundle.path(file)), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises bare classes of its own for every kind of bad file
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {file} ({error}); export the bundle again") from error
    values = [*session.get_inputs(), *session.get_outputs()]
    foreign = sorted({value.type for value in values} - set(_ORT_DTYPES))
    if foreign:
        raise BundleError(f"{file} has inputs or outputs of type {', '.join(foreign)}; export the bundle again")
    inputs, outputs = ({v.name: v.shape for v in part} for part in (session.get_inputs(), session.get_outputs()))
    check_interface(bundle.manifest, graph, file, inputs, outputs)
    return session
