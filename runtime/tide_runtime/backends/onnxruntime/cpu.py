"""ONNX Runtime on the CPU: one session per graph, everything bound once per shape, caches updated in place.

A segment is compiled in several forms: ``segment_i`` with GroupQueryAttention (GQA), ``segment_i.ragged`` with another GQA kernel
for sequences with different numbers of cached tokens, and ``segment_i.batched`` with matrix products for several sequences
(see `tide_runtime.backends.attention`). The same holds for ``uncut``, all segments as one graph, for tokens that run every layer.
Graphs that many applications never use are loaded by the first step that runs them: the forms for several sequences,
``kv_fill_c`` and, in a bundle without exits, the segments and ``head``.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.attention import ATTENTION_BIAS, AttentionBias, batched_decode_is_faster, prefers_batched
from tide_runtime.backends.base import Step
from tide_runtime.backends.graph_contract import check_interface, hidden_states
from tide_runtime.backends.kv_caches import KVCaches
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.backends.step_arrays import StepBuffers, StepPositions, StepShape
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import HEAD, UNCUT, Manifest, batched_graph, forms_of, kv_fill_graph, ragged_graph
from tide_runtime.errors import BundleError, ParamsError

_NUMPY_DTYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}  # NumPy has no bf16
_ORT_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": np.uint16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
_KEPT_STEPS = 128  # step shapes whose bindings a context keeps; policies that skip layers use many


class OnnxRuntimeBackend:
    """The ``cpu`` target. Sessions may run in several threads; each caller needs its own ``ExecutionContext``."""

    name = "onnxruntime-cpu"

    def __init__(
        self,
        manifest: Manifest,
        layers: dict[str, int],
        load: Callable[[str], ort.InferenceSession],
        ragged: Set[str] = frozenset(),
    ) -> None:
        """Load the sessions that every application uses.

        Args:
            layers: graph name → number of decoder layers it runs.
            load: creates the session of a graph, or of another form of a segment, by name.
            ragged: names of the ragged forms that the target has.
        """
        self.manifest, self.layers, self._load, self.ragged = manifest, layers, load, ragged
        segments = [segment.name for segment in manifest.segments]
        self.every_layer = [UNCUT] if UNCUT in layers else segments
        exits = manifest.calibration.exits if manifest.calibration is not None else []
        lazy = {kv_fill_graph(e) for e in exits} if exits else {HEAD, *segments} - {*self.every_layer}
        self.sessions = {form: load(form) for form in (self.initial_form(name) for name in layers if name not in lazy)}
        self.launches: dict[str, int] = Counter()
        self.batched_decode_is_faster = batched_decode_is_faster(manifest)
        self.dtype = _NUMPY_DTYPES[manifest.dtype]
        outputs = {value.name: value for session in self.sessions.values() for value in session.get_outputs()}
        self.logits_dtype = _ORT_DTYPES[outputs["logits"].type]
        self._lock = threading.Lock()

    @classmethod
    def load(cls, bundle: Bundle, target: str, threads: ThreadOptions) -> OnnxRuntimeBackend:
        """Load the graphs of ``target``. Raises BundleError when ONNX Runtime refuses one or it breaks the contract."""
        manifest, files = bundle.manifest, bundle.manifest.targets[target].graphs
        missing = sorted({batched_graph(s.name) for s in manifest.segments} - set(files))
        if missing:
            raise BundleError(f"target {target} lacks graphs {missing}: an older tide-export made it; export the bundle again")
        layers = decoder_layers(manifest, files)
        whole = {form for graph, count in layers.items() if count == manifest.model.num_layers for form in forms_of(graph)}

        def load(name: str) -> ort.InferenceSession:
            options = session_options(threads, chained=name not in whole)
            return load_session(bundle, name, files[name], options, ["CPUExecutionProvider"])

        return cls(manifest, layers, load, {ragged_graph(name) for name in layers} & set(files))

    def context(self, capacity: int) -> OnnxRuntimeContext:
        return OnnxRuntimeContext(self, capacity)

    def initial_form(self, graph: str) -> str:
        """The form of ``graph`` that is loaded together with the backend."""
        return graph

    def session(self, name: str) -> ort.InferenceSession:
        """The session of a graph or form, loaded on first use together with the same form of all segments."""
        if name not in self.sessions:
            forms = [{form(segment.name) for segment in self.manifest.segments} for form in (batched_graph, ragged_graph)]
            self._load_lazily(next((names for names in forms if name in names), {name}))
        return self.sessions[name]

    def has_sliding_window(self) -> bool:
        """Whether the attention of some layers is limited to a sliding window."""
        segments = (self.session(batched_graph(segment.name)) for segment in self.manifest.segments)
        names = {value.name for session in segments for value in session.get_inputs()}
        return any(name.startswith(ATTENTION_BIAS) and name != ATTENTION_BIAS for name in names)

    def _load_lazily(self, names: set[str]) -> None:
        """Load the sessions that are missing. Raises BundleError like `load`."""
        with self._lock:
            for name in sorted(names - set(self.sessions)):
                self.sessions[name] = self._load(name)


class OnnxRuntimeContext:
    """KV caches in host memory, and the steps bound to them."""

    def __init__(self, backend: OnnxRuntimeBackend, capacity: int) -> None:
        self.backend, self.capacity, self.layers_launched = backend, capacity, 0
        self.every_layer: Sequence[str] = backend.every_layer
        self.caches = KVCaches(backend.manifest, backend.dtype, capacity)
        self.buffers = StepBuffers(backend.manifest, backend.dtype, backend.logits_dtype)
        self._steps: OrderedDict[StepShape, _BoundStep] = OrderedDict()
        self._latest: tuple[tuple[int, list[int], list[int]], _BoundStep] | None = None
        self._bound_caches: dict[tuple[int, int, int], dict[str, ort.OrtValue]] = {}

    def step(self, first_index: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        key = (first_index, counts, wanted or [])
        if self._latest is not None and self._latest[0] == key:  # consecutive decode steps have the same counts
            return self._latest[1]
        shape = StepShape.of(*key)
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = _BoundStep(self, shape)
            if len(self._steps) > _KEPT_STEPS:
                self._steps.popitem(last=False)
        else:
            self._steps.move_to_end(shape)
        step.positions.arrange(counts, wanted)
        self._latest = (first_index, list(counts), list(wanted)), step
        return step

    def count(self, graph: str) -> None:
        """Count one launch of ``graph``. Launches are counted here only."""
        self.backend.launches[graph] += 1
        self.layers_launched += self.backend.layers[graph]

    def reserve(self, needed: int) -> None:
        """Grow the caches to ``needed`` slots. Raises CacheFullError beyond the bundle's max_seq_len."""
        generation = self.caches.generation
        self.caches.reserve(needed)
        if self.caches.generation != generation:
            self._bound_caches.clear()
            for step in self._steps.values():
                step.unbind()  # bindings would keep the replaced memory alive

    def bound_caches(self, first_index: int, batch_size: int) -> dict[str, ort.OrtValue]:
        """Name → OrtValue of the caches of consecutive batch indices, with their current number of slots."""
        key = (first_index, batch_size, self.caches.slots)
        if key not in self._bound_caches:
            part, arrays = slice(first_index, first_index + batch_size), self.caches.arrays.items()
            self._bound_caches[key] = {name: ort.OrtValue.ortvalue_from_numpy(array[part]) for name, array in arrays}
        return self._bound_caches[key]

    def clear(self) -> None:
        self.caches.clear()

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        self.caches.move_row(source, target, num_cached_tokens)

    def close(self) -> None:
        self._steps.clear()
        self._bound_caches.clear()
        self._latest = None


@dataclass
class _Bound:
    """Bindings of a step to caches of ``slots`` slots: bound runs by form, attention masks by input name."""

    slots: int
    runs: dict[str, Callable[[], None]] = field(default_factory=dict)
    biases: dict[str, AttentionBias] = field(default_factory=dict)


class _BoundStep:
    """Arrays of one step shape, and an IO binding per form and number of cache slots, created when first run."""

    def __init__(self, context: OnnxRuntimeContext, shape: StepShape) -> None:
        self.shape, self.positions = shape, StepPositions(shape)
        arrays = context.buffers.views(shape)
        self.input_ids, self.hidden, self.logits, self.token, self.score = arrays
        self._context = context
        self._num_cached_tokens: Sequence[int] = [0] * shape.batch_size
        self._batched = self._ragged = False
        self._bound_by_slots: dict[int, _Bound] = {}
        self._bound = self._bound_by_slots[context.caches.slots] = _Bound(context.caches.slots)  # for the current caches
        self._generation = context.caches.generation

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        context, shape, longest = self._context, self.shape, max(num_cached_tokens)
        if longest + shape.seq > context.caches.slots:
            context.reserve(longest + shape.seq)
        self._num_cached_tokens = list(num_cached_tokens)
        if shape.batch_size == 1:
            self._batched = self._ragged = False
        else:
            is_faster = context.backend.batched_decode_is_faster
            self._batched = not shape.even or prefers_batched(num_cached_tokens, shape.seq, context.caches.slots, is_faster)
            self._ragged = not self._batched and min(num_cached_tokens) != longest
        self.positions.place(num_cached_tokens)
        self._follow_caches()
        if self._batched:
            for bias in self._bound.biases.values():
                bias.fill(num_cached_tokens)

    def place_scattered(self, slot: int, positions: NDArray[np.int64], before: NDArray[np.int64] | None = None) -> None:
        self._context.reserve(slot + len(positions))
        self._follow_caches()
        self.positions.place_scattered(slot, positions)
        self._batched, self._ragged = True, False
        if before is not None:
            if self._context.backend.has_sliding_window():
                raise ParamsError(
                    "prefill_exit puts prompt tokens into the cache in another order, and this model's sliding windows go by "
                    "that order; leave prefill_exit out"
                )
            self._bias(ATTENTION_BIAS).fill_scattered(before, positions)

    def run(self, graph: str) -> None:
        self._context.count(graph)
        form = self._form(graph)
        self._follow_caches()  # another step may have grown them since `place`
        try:
            run = self._bound.runs.get(form)
            if run is None:
                run = self._bound.runs[form] = self._bind(graph, form)
            run()
        except BundleError:
            raise
        except Exception as error:  # ONNX Runtime raises RuntimeError and unrelated classes
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {graph} ({error}); export the bundle again") from error

    def _form(self, graph: str) -> str:
        """The form of ``graph`` that runs this step as placed."""
        backend = self._context.backend
        if not backend.layers[graph]:
            return graph
        if self._batched:
            return batched_graph(graph)
        return ragged_graph(graph) if self._ragged and ragged_graph(graph) in backend.ragged else graph

    def unbind(self) -> None:
        """Drop all bindings; the caches' memory has been replaced."""
        caches = self._context.caches
        self._bound_by_slots.clear()
        self._bound = self._bound_by_slots[caches.slots] = _Bound(caches.slots)
        self._generation = caches.generation

    def _follow_caches(self) -> None:
        """Use the bindings for the current number of cache slots."""
        caches = self._context.caches
        if self._generation != caches.generation:
            self.unbind()
        if self._bound.slots != caches.slots:
            self._bound = self._bound_by_slots.setdefault(caches.slots, _Bound(caches.slots))
            for bias in self._bound.biases.values():  # filled by an earlier step over this many slots
                bias.fill(self._num_cached_tokens)

    def _bind(self, graph: str, form: str) -> Callable[[], None]:
        session = self._context.backend.session(form)
        caches = self._context.bound_caches(self.shape.first_index, self.shape.batch_size)
        arrays = self._arrays(graph, packed=form == batched_graph(graph) or not self._context.backend.layers[graph])
        binding = session.io_binding()
        for value in session.get_inputs():
            name = value.name
            array = self._bias(name).array if name.startswith(ATTENTION_BIAS) else arrays.get(name)
            binding.bind_ortvalue_input(name, caches[name] if array is None else ort.OrtValue.ortvalue_from_numpy(array))
        for value in session.get_outputs():
            in_place = value.name.replace("_cache_out_", "_cache_")
            array = arrays.get(value.name)
            bound = caches[in_place] if array is None else ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_output(value.name, bound)
        return lambda: session.run_with_iobinding(binding)

    def _arrays(self, graph: str, packed: bool) -> dict[str, NDArray[Any]]:
        """The step's arrays by graph input and output name: [1, T, …] when ``packed``, else [B, S, …]."""
        manifest, shape = self._context.backend.manifest, self.shape
        reads, writes = hidden_states(manifest, graph)
        tokens = (1, shape.tokens) if packed else (shape.batch_size, shape.seq)
        outputs = shape.tokens if graph == HEAD else shape.outputs
        return {
            "input_ids": self.input_ids.reshape(tokens),
            "hidden": self.hidden[reads].reshape(*tokens, -1),
            "hidden_out": self.hidden[writes].reshape(*tokens, -1),
            "logits": self.logits[None, :outputs],
            "token": self.token[None, :outputs],
            "score": self.score.reshape(tokens),
            **self.positions.arrays,
            "position_ids": self.positions.arrays["position_ids"].reshape(tokens),
        }

    def _bias(self, name: str) -> AttentionBias:
        if name not in self._bound.biases:
            shape = self.shape
            bias = self._bound.biases[name] = AttentionBias.named(name, shape.batch_size, shape.seq, self._context.caches.slots)
            bias.fill(self._num_cached_tokens)
        return self._bound.biases[name]


def decoder_layers(manifest: Manifest, graphs: Container[str]) -> dict[str, int]:
    """Name → number of decoder layers, for every graph that a target with ``graphs`` can run."""
    layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in manifest.graphs}
    return layers | ({UNCUT: manifest.model.num_layers} if UNCUT in graphs else {})


def load_session(
    bundle: Bundle, name: str, file: str, options: ort.SessionOptions, providers: Sequence[str | tuple[str, dict[str, str]]]
) -> ort.InferenceSession:
    """A session of graph ``name``. Raises BundleError when ONNX Runtime refuses its ``file`` or it breaks the contract."""
    try:
        session = ort.InferenceSession(str(bundle.path(file)), options, providers=list(providers))
    except Exception as error:  # ONNX Runtime raises unrelated exception classes for bad files
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {file} ({error}); export the bundle again") from error
    values = [*session.get_inputs(), *session.get_outputs()]
    foreign = sorted({value.type for value in values} - set(_ORT_DTYPES))
    if foreign:
        raise BundleError(f"{file} has inputs or outputs of type {', '.join(foreign)}; export the bundle again")
    inputs, outputs = ({v.name: v.shape for v in part} for part in (session.get_inputs(), session.get_outputs()))
    check_interface(bundle.manifest, name, file, inputs, outputs)
    return session
