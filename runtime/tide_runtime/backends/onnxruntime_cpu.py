"""ONNX Runtime on the CPU: one session per graph, everything bound once per shape, caches updated in place.

GroupQueryAttention refuses several rows with several tokens each over a filled cache; ``_RowByRow`` runs such a step one
row at a time on views of the same buffers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.base import Step
from tide_runtime.backends.threads import ThreadOptions, session_options
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError
from tide_runtime.manifest import Manifest

_ORT_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
_KEPT_STEPS = 32  # shapes whose bindings are kept per Slots; decode uses a handful, prefill many


class OnnxRuntimeBackend:
    """The ``cpu`` target. Sessions are safe to run from several threads; each caller takes its own ``Slots``."""

    name = "onnxruntime-cpu"

    def __init__(self, bundle: Bundle, target: str, threads: ThreadOptions) -> None:
        options = session_options(threads)
        files = bundle.manifest.targets[target].graphs
        self.manifest = bundle.manifest
        self.launches: dict[str, int] = Counter()
        self.layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in bundle.manifest.graphs}
        self.sessions = {name: _load(bundle, file, options) for name, file in files.items()}
        cache = next(i for i in self.sessions[bundle.manifest.segments[0].name].get_inputs() if i.name.startswith("key_cache_"))
        hidden = self.sessions["embed"].get_outputs()[0]
        self.cache_dtype, self.hidden_dtype = _ORT_DTYPES[cache.type], _ORT_DTYPES[hidden.type]
        self.logits_dtype = _ORT_DTYPES[self.sessions["head"].get_outputs()[0].type]

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
                self.caches[f"{kind}_cache_{layer}"] = np.zeros(shape, backend.cache_dtype)
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
        model, boundaries = backend.manifest.model, len(backend.manifest.segments) + 1
        self.input_ids = np.zeros((rows, seq), np.int64)
        self.position_ids = np.zeros((rows, seq), np.int64)
        self.write_index = np.zeros(rows, np.int64)
        self.hidden = [np.zeros((rows, seq, model.hidden_size), backend.hidden_dtype) for _ in range(boundaries)]
        # A long prefill asks for its last token's logits only, through a step of one token: nothing of [S, V] is touched.
        self.logits = np.zeros((rows, seq, model.vocab_size), backend.logits_dtype)
        self.token = np.zeros((rows, seq), np.int64)

    def row(self, index: int) -> _Buffers:
        view = object.__new__(_Buffers)
        for name in ("input_ids", "position_ids", "write_index", "logits", "token"):
            setattr(view, name, getattr(self, name)[index : index + 1])
        view.hidden = [h[index : index + 1] for h in self.hidden]
        return view


class _BoundStep:
    """One IO binding per graph, made when the graph is first run."""

    def __init__(self, slots: OnnxRuntimeSlots, buffers: _Buffers, first_row: int) -> None:
        self.input_ids, self.position_ids = buffers.input_ids, buffers.position_ids
        self.write_index, self.hidden = buffers.write_index, buffers.hidden
        self.logits, self.token = buffers.logits, buffers.token
        self._slots, self._first_row = slots, first_row
        self._runs: dict[str, Callable[[], None]] = {}

    def run(self, graph: str) -> None:
        self._slots.count(graph)
        run = self._runs.get(graph)
        if run is None:
            run = self._runs[graph] = self._bind(graph)
        run()

    def _bind(self, graph: str) -> Callable[[], None]:
        session = self._slots.backend.sessions[graph]
        first, last = _boundaries(self._slots.backend.manifest, graph)
        arrays = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "write_index": self.write_index,
            "hidden": self.hidden[first],
            "hidden_out": self.hidden[last],
            "logits": self.logits,
            "token": self.token,
        }
        rows = slice(self._first_row, self._first_row + len(self.write_index))
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
        self.input_ids, self.position_ids, self.write_index = whole.input_ids, whole.position_ids, whole.write_index
        self.hidden, self.logits, self.token = whole.hidden, whole.logits, whole.token
        self._whole, self._rows = whole, rows

    def run(self, graph: str) -> None:
        if graph in ("embed", "head"):
            self._whole.run(graph)
        else:
            for row in self._rows:
                row.run(graph)


def _boundaries(manifest: Manifest, graph: str) -> tuple[int, int]:
    """Numbers of the boundaries that ``graph`` reads and writes."""
    last = len(manifest.segments)
    if graph in ("embed", "head"):
        return (0, 0) if graph == "embed" else (last, last)
    number = [g.name for g in manifest.segments].index(graph)
    return number, number + 1


def _load(bundle: Bundle, file: str, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(bundle.path(file)), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises bare classes of its own for every kind of bad file
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {file} ({error}); export the bundle again") from error
