"""ONNX Runtime on the CPU: one session per graph, everything bound once per shape, caches updated in place.

A segment is compiled twice: ``segment_i`` with GroupQueryAttention, ``segment_i.batched`` with plain products for steps of
several rows (see attention_form). ONNX Runtime keeps packed copies of the weights in every session, so the second form is
loaded when a step first needs it, and whoever runs one row at a time never pays for it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends import attention_bias
from tide_runtime.backends.attention_bias import AttentionBias
from tide_runtime.backends.attention_form import prefers_plain
from tide_runtime.backends.base import Step
from tide_runtime.backends.interface import check_interface, hidden_states
from tide_runtime.backends.kv_caches import KVCaches
from tide_runtime.backends.threads import ThreadOptions, session_options
from tide_runtime.bundle import Bundle
from tide_runtime.errors import BundleError
from tide_runtime.manifest import Manifest, batched_graph

_NUMPY_DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16}
_ORT_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
_KEPT_STEPS = 128  # shapes whose bindings are kept per Slots; policies that skip layers use many


class OnnxRuntimeBackend:
    """The ``cpu`` target. Sessions are safe to run from several threads; each caller takes its own ``Slots``."""

    name = "onnxruntime-cpu"

    def __init__(self, manifest: Manifest, layers: dict[str, int], load: Callable[[str], ort.InferenceSession]) -> None:
        """``layers``: graph name → how many decoder layers it runs. ``load``: makes the session of a graph, or of a
        segment's form for several rows, given its name."""
        self.manifest, self.layers, self._load = manifest, layers, load
        self.sessions = {name: load(name) for name in layers}
        self.launches: dict[str, int] = Counter()
        self.dtype = _NUMPY_DTYPES[manifest.dtype]
        outputs = {value.name: value for session in self.sessions.values() for value in session.get_outputs()}
        self.logits_dtype = _ORT_DTYPES[outputs["logits"].type]
        self._lock = threading.Lock()

    @classmethod
    def load(cls, bundle: Bundle, target: str, threads: ThreadOptions) -> OnnxRuntimeBackend:
        """Load the graphs of ``target``. Raises BundleError when ONNX Runtime refuses one or it breaks the contract."""
        manifest, options, files = bundle.manifest, session_options(threads), bundle.manifest.targets[target].graphs
        missing = sorted({batched_graph(s.name) for s in manifest.segments} - set(files))
        if missing:
            raise BundleError(f"target {target} lacks graphs {missing}: an older tide-export made it; export the bundle again")
        layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in manifest.graphs}
        return cls(manifest, layers, lambda name: _load_session(bundle, name, files[name], options))

    def slots(self, capacity: int) -> OnnxRuntimeSlots:
        return OnnxRuntimeSlots(self, capacity)

    def session(self, name: str) -> ort.InferenceSession:
        """The session of a graph, or of a segment's form for several rows, which may have to be loaded first."""
        if name not in self.sessions:
            self.load_batched()
        return self.sessions[name]

    def load_batched(self) -> None:
        """Load the segments' forms for several rows, unless that has been done. Raises BundleError like `load`."""
        with self._lock:
            for name, layers in self.layers.items():
                if layers and batched_graph(name) not in self.sessions:
                    self.sessions[batched_graph(name)] = self._load(batched_graph(name))


class OnnxRuntimeSlots:
    """KV caches in host memory."""

    def __init__(self, backend: OnnxRuntimeBackend, capacity: int) -> None:
        self.backend, self.capacity, self.layers_launched = backend, capacity, 0
        self.caches = KVCaches(backend.manifest, backend.dtype, capacity)
        self._steps: OrderedDict[tuple[int, int, int], _BoundStep] = OrderedDict()

    def step(self, first_row: int, rows: int, seq: int) -> Step:
        key = (first_row, rows, seq)
        if key in self._steps:
            self._steps.move_to_end(key)
            return self._steps[key]
        step = self._steps[key] = _BoundStep(self, first_row, rows, seq)
        if len(self._steps) > _KEPT_STEPS:
            self._steps.popitem(last=False)
        return step

    def count(self, graph: str) -> None:
        """Note one launch of ``graph``: the only place where launches are counted."""
        self.backend.launches[graph] += 1
        self.layers_launched += self.backend.layers[graph]

    def reserve(self, needed: int) -> None:
        """Have at least ``needed`` cache slots a row. Raises CacheFullError when the bundle has fewer."""
        if self.caches.reserve(needed):
            for step in self._steps.values():
                step.unbind()  # would keep the arrays alive that have been replaced

    def move_row(self, source: int, target: int, length: int) -> None:
        self.caches.move_row(source, target, length)


class _Positions:
    """Where a step's tokens go, in the forms that kernels ask for: the graphs' inputs by name."""

    def __init__(self, rows: int, seq: int) -> None:
        self._write_index = np.zeros(rows, np.int64)
        self._position_ids = np.zeros((rows, seq), np.int64)
        self._seqlens_k = np.zeros(rows, np.int32)
        self._total = np.zeros((), np.int32)
        self.arrays: dict[str, NDArray[Any]] = {
            "write_index": self._write_index,
            "position_ids": self._position_ids,
            "seqlens_k": self._seqlens_k,
            "total_sequence_length": self._total,
        }

    def place(self, lengths: Sequence[int]) -> None:
        seq = self._position_ids.shape[1]
        self._seqlens_k[:] = [length + seq - 1 for length in lengths]
        self._total[()] = max(lengths) + seq
        self._write_index[:] = lengths
        if seq == 1:
            self._position_ids[:, 0] = self._write_index
        else:
            np.add(self._write_index[:, None], np.arange(seq), out=self._position_ids)


class _BoundStep:
    """The arrays of one step, and one IO binding per graph and form, made when it is first run."""

    def __init__(self, slots: OnnxRuntimeSlots, first_row: int, rows: int, seq: int) -> None:
        backend = slots.backend
        model = backend.manifest.model
        self.input_ids = np.zeros((rows, seq), np.int64)
        self.hidden = [np.zeros((rows, seq, model.hidden_size), backend.dtype) for _ in backend.manifest.segments]
        # A long prefill asks for its last token's logits only, through a step of one token: nothing of [S, V] is touched.
        self.logits = np.zeros((rows, seq, model.vocab_size), backend.logits_dtype)
        self.token = np.zeros((rows, seq), np.int64)
        self.score = np.zeros((rows, seq), np.float32)
        self._slots, self._rows, self._seq = slots, slice(first_row, first_row + rows), seq
        self._positions = _Positions(rows, seq)
        self._lengths = [0] * rows
        self._plain = False
        self._biases: dict[str, AttentionBias] = {}
        self._runs: dict[str, Callable[[], None]] = {}
        self._generation = slots.caches.generation

    def place(self, lengths: Sequence[int]) -> None:
        slots = self._slots
        slots.reserve(max(lengths) + self._seq)
        self._lengths = list(lengths)
        self._plain = prefers_plain(lengths, self._seq, slots.caches.slots, slots.backend.manifest.kv[0].heads)
        self._positions.place(lengths)
        if self._generation != slots.caches.generation:
            self.unbind()
        if self._plain:
            for bias in self._biases.values():
                bias.fill(lengths)

    def run(self, graph: str) -> None:
        self._slots.count(graph)
        form = batched_graph(graph) if self._plain and self._slots.backend.layers[graph] else graph
        if self._generation != self._slots.caches.generation:  # grown after this step was dropped from the kept ones
            self.unbind()
        try:
            run = self._runs.get(form)
            if run is None:
                run = self._runs[form] = self._bind(graph, form)
            run()
        except BundleError:
            raise
        except Exception as error:  # ONNX Runtime raises RuntimeError and bare classes of its own
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {graph} ({error}); export the bundle again") from error

    def unbind(self) -> None:
        """Forget what is bound to caches that have been replaced."""
        self._runs.clear()
        self._biases.clear()
        self._generation = self._slots.caches.generation

    def _bind(self, graph: str, form: str) -> Callable[[], None]:
        backend, caches = self._slots.backend, self._slots.caches.arrays
        session = backend.session(form)
        reads, writes = hidden_states(backend.manifest, graph)
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids,
            "hidden": self.hidden[reads],
            "hidden_out": self.hidden[writes],
            "logits": self.logits,
            "token": self.token,
            "score": self.score,
            **self._positions.arrays,
        }
        binding = session.io_binding()
        for value in session.get_inputs():
            if value.name.startswith(attention_bias.NAME):
                array: NDArray[Any] = self._bias(value.name).array
            else:
                array = caches[value.name][self._rows] if value.name in caches else arrays[value.name]
            binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy(array))
        for value in session.get_outputs():
            in_place = value.name.replace("_cache_out_", "_cache_")
            array = caches[in_place][self._rows] if in_place in caches else arrays[value.name]
            binding.bind_ortvalue_output(value.name, ort.OrtValue.ortvalue_from_numpy(array))
        return lambda: session.run_with_iobinding(binding)

    def _bias(self, name: str) -> AttentionBias:
        if name not in self._biases:
            bias = self._biases[name] = AttentionBias.named(name, len(self.input_ids), self._seq, self._slots.caches.slots)
            bias.fill(self._lengths)
        return self._biases[name]


def _load_session(bundle: Bundle, name: str, file: str, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        session = ort.InferenceSession(str(bundle.path(file)), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises bare classes of its own for every kind of bad file
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {file} ({error}); export the bundle again") from error
    values = [*session.get_inputs(), *session.get_outputs()]
    foreign = sorted({value.type for value in values} - set(_ORT_DTYPES))
    if foreign:
        raise BundleError(f"{file} has inputs or outputs of type {', '.join(foreign)}; export the bundle again")
    inputs, outputs = ({v.name: v.shape for v in part} for part in (session.get_inputs(), session.get_outputs()))
    check_interface(bundle.manifest, name, file, inputs, outputs)
    return session
