"""ONNX Runtime on the CPU: every step bound once per shape, caches in host memory updated in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.base import LoopStep, Step
from tide_runtime.backends.graph_contract import ADAPTER_ROWS, decoder_layers, hidden_states, read_name
from tide_runtime.backends.kv_caches import KVCaches, cache_full, kv_bytes_per_token
from tide_runtime.backends.launch_bits import launches_agree
from tide_runtime.backends.onnxruntime.adapted_graph import AdaptedWeights
from tide_runtime.backends.onnxruntime.invariance import LEAST_PADDING, bundle_row_padding, machine_key
from tide_runtime.backends.onnxruntime.packed_weights import PACKED_OUTPUT, PackedWeights, packed_weights
from tide_runtime.backends.onnxruntime.sessions import CPU_PROVIDER, Sessions, load_session
from tide_runtime.backends.onnxruntime.threads import ThreadOptions, session_options
from tide_runtime.backends.pass_costs import kept_loop_costs, kept_pass_costs, padding_price
from tide_runtime.backends.prefix_blocks import PrefixBlocks
from tide_runtime.backends.recurrent_states import (
    RecurrentStates,
    StateMemory,
    StateSnapshots,
    StepStates,
    state_bytes,
)
from tide_runtime.backends.step_arrays import (
    ATTENTION_BIAS,
    NO_PADDING,
    AttentionBias,
    RowEnds,
    RowPadding,
    StepBuffers,
    StepPositions,
    StepShape,
)
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import ADVANCE, DRAFT, HEAD, LOOP, STATES, UNCUT, batched_graph, forms_of
from tide_runtime.errors import AdapterError, BundleError, ParamsError
from tide_runtime.lora import LoraAdapter

Measured = TypeVar("Measured")
_NO_STATES = StepStates(0, 0)  # of a step that reads no states
ADAPTED = "adapted"  # form of the graph of all layers, for tokens of any adapters
_KEPT_STEPS = 128  # step shapes whose bindings a context keeps; policies that skip layers use many


def adapted_form(*adapters: int) -> str:
    """Name of the graph of all layers whose tokens have the one of ``adapters`` or none, or any where there are several."""
    return f"{ADAPTED}_{adapters[0]}" if len(adapters) == 1 else ADAPTED


class OnnxRuntimeBackend(Sessions):
    """The ``cpu`` target. Sessions may run in several threads; each caller needs its own ``ExecutionContext``."""

    name, packs_steps, has_prefix_blocks = "onnxruntime-cpu", True, True
    measure_padding: Callable[[OnnxRuntimeBackend], RowPadding | None] = staticmethod(lambda _: NO_PADDING)  # see `row_padding`
    measure_passes: Callable[[OnnxRuntimeBackend], CostTable] | None = None  # see `pass_costs`
    measure_loops: Callable[[OnnxRuntimeBackend], CostTable] | None = None  # see `loop_costs`
    machine_key: Sequence[str] = ()  # see `invariance.machine_key`
    bits = "same"  # or ``fast``: launches are not padded
    private_weights = ""
    load_adapted: Callable[[Sequence[LoraAdapter]], ort.InferenceSession]  # the graph of all layers with adapters
    adapters: Sequence[LoraAdapter] = ()
    adapted: Mapping[str, ort.InferenceSession] = MappingProxyType({})  # forms of the graph of all layers, see `adapted_form`

    @classmethod
    def load(cls, bundle: Bundle, target: str, threads: ThreadOptions) -> OnnxRuntimeBackend:
        """Load the graphs of ``target``.

        Raises BundleError when ONNX Runtime refuses a graph, it breaks the contract, or its attention is not padded, as in
        bundles of versions before the first release.
        """
        manifest, files = bundle.manifest, bundle.manifest.targets[target].graphs
        if manifest.kv and not manifest.targets[target].pads_attention:
            raise BundleError(f"the graphs of target {target} do not pad attention: export the bundle again with this version")
        if manifest.is_recurrent and ADVANCE not in files:
            raise BundleError(f"target {target} lacks the graph {ADVANCE}, which undoes rejected drafts; export the bundle again")
        layers = decoder_layers(manifest, files)
        whole = {form for graph, count in layers.items() if count == manifest.model.num_layers for form in forms_of(graph)}
        whole.add(LOOP)  # of one sequence's steps the only graph

        packed = packed_weights(bundle, target, threads)

        def load(name: str, shared: PackedWeights | AdaptedWeights = packed) -> ort.InferenceSession:
            options = session_options(threads, chained=name not in whole)
            own = shared if name != ADVANCE else None  # it has no weights
            return load_session(bundle, name, files[name], options, [CPU_PROVIDER], own)

        backend = cls(manifest, layers, load, set(files) - set(layers))
        backend.private_weights = packed.reason
        chains = [backend.every_layer, *([[s.name for s in manifest.segments]] if manifest.calibration is not None else [])]
        backend.measure_padding = lambda view: bundle_row_padding(
            bundle,
            target,
            threads,
            lambda padding: all(
                launches_agree(partial(context, padding=padding), chains, manifest.model.vocab_size, manifest.max_seq_len)
                for context in (backend.context, *view.adapted_contexts())
            ),
            [*(adapter.digest for adapter in view.adapters), *view.adapted],
        )
        backend.load_adapted = lambda adapters: load(backend.every_layer[0], AdaptedWeights(packed, adapters, backend.dtype))
        backend.machine_key = key = machine_key(bundle, target, threads)
        backend.measure_passes = lambda view: kept_pass_costs(
            [*key, str(view.default_padding)], view.context, manifest.max_seq_len, target
        )
        if LOOP in layers:
            backend.measure_loops = lambda view: kept_loop_costs(
                [*key, str(view.default_padding)], partial(view.context, loops_as_rows=True), manifest.max_seq_len, target
            )
        return backend

    def with_bits(self, bits: str) -> OnnxRuntimeBackend:
        if bits == self.bits:
            return self
        view = copy(self)
        view.bits = bits
        for measured in ("row_padding", "padding_price", "pass_costs", "loop_costs"):
            view.__dict__.pop(measured, None)
        return view

    def with_adapters(self, adapters: Sequence[LoraAdapter]) -> OnnxRuntimeBackend:
        """The same sessions, and the graph of all layers with ``adapters``, for steps that have rows with one: with all of them,
        and with each alone, because a step reads the matrices of all that its graph has.

        Raises AdapterError where they do not fit the model, or it has no graph of all layers that runs each once.
        """
        if len(self.every_layer) > 1 or self.manifest.model.loops > 1:
            why = "runs its layers in loops" if self.manifest.model.loops > 1 else "has no graph of all layers on this target"
            raise AdapterError(f"this model {why}, so adapters cannot be added to it; merge them into it and export that")
        if [adapter.digest for adapter in adapters] == [adapter.digest for adapter in self.adapters]:
            return self
        view = copy(self)
        forms = {ADAPTED: list(adapters)} if adapters else {}
        if len(adapters) > 1:
            forms |= {adapted_form(number): [one] for number, one in enumerate(adapters, 1)}
        view.adapters, view.adapted = adapters, {form: self.load_adapted(chosen) for form, chosen in forms.items()}
        for measured in ("row_padding", "padding_price"):
            view.__dict__.pop(measured, None)
        return view

    def adapted_contexts(self) -> list[Callable[..., OnnxRuntimeContext]]:
        """Makers of contexts of two rows: the model itself beside an adapter, and each adapter beside the next and the first
        beside the model."""

        def make(rows: tuple[int, int], capacity: int, padding: RowPadding) -> OnnxRuntimeContext:
            context = self.context(capacity, padding=padding)
            context.adapters = list(rows[:capacity])
            return context

        count = len(self.adapters)
        pairs = [(0, 1), (1, 0), *((n, n % count + 1) for n in range(1, count + 1))] if count else []
        return [partial(make, pair) for pair in pairs]

    def without_draft_head(self) -> OnnxRuntimeBackend:
        if DRAFT not in self.layers:
            return self
        view = copy(self)
        view.layers = {graph: count for graph, count in self.layers.items() if graph != DRAFT}
        return view

    @cached_property
    def row_padding(self) -> RowPadding | None:
        if self.bits != "same":
            return None
        padding = self._uncounted(lambda: self.measure_padding(self))
        if padding is None and len(self.adapted) > 1:  # graphs with one adapter may have other bits than the one with all
            self.adapted = {ADAPTED: self.adapted[ADAPTED]}
            padding = self._uncounted(lambda: self.measure_padding(self))
        return padding

    @property
    def default_padding(self) -> RowPadding:
        """How the launches of its contexts are padded."""
        return NO_PADDING if self.bits == "fast" else self.row_padding or LEAST_PADDING

    @cached_property
    def padding_price(self) -> float:
        if self.row_padding is None or self.row_padding.launch == NO_PADDING.launch:
            return 1.0
        plain = self.row_padding._replace(launch=NO_PADDING.launch)
        contexts = self.context(1), self.context(1, padding=plain)
        return self._uncounted(lambda: padding_price(*contexts, self.manifest.max_seq_len))

    @cached_property
    def pass_costs(self) -> CostTable | None:
        measure = self.measure_passes
        return self._uncounted(lambda: measure(self)) if measure is not None else None

    @cached_property
    def loop_costs(self) -> CostTable | None:
        """What launches of `LOOP` take, by tokens of each sequence; None where there is none."""
        measure = self.measure_loops
        return self._uncounted(lambda: measure(self)) if measure is not None else None

    def _uncounted(self, measure: Callable[[], Measured]) -> Measured:
        """The result of ``measure``, whose launches serve no request and do not count."""
        counted = dict(self.launches)
        measured = measure()
        self.launches.clear()
        self.launches.update(counted)
        return measured

    @property
    def kv_bytes_per_token(self) -> int:
        caches = self.manifest.caches if DRAFT in self.layers else self.manifest.kv
        return kv_bytes_per_token(caches, np.dtype(self.cache_dtype).itemsize)

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.manifest)

    @property
    def bits_key(self) -> list[str]:
        return [*self.machine_key, str(self.default_padding), *(adapter.digest for adapter in self.adapters)]

    @cached_property
    def operands(self) -> dict[str, list[int]]:
        """What steps with drafts keep of each token: name → shape."""
        outputs = (value for graph in self.every_layer for value in self.session(graph).get_outputs())
        return {value.name: value.shape[2:] for value in outputs if value.name.startswith("undo_")}

    def context(
        self, capacity: int, prefix_blocks: int = 0, *, padding: RowPadding | None = None, loops_as_rows: bool = False
    ) -> OnnxRuntimeContext:
        """See `Backend`.

        Args:
            padding: replaces `default_padding`, to measure what it does.
            loops_as_rows: for `OnnxRuntimeContext.loop_step`. Other steps then take one sequence each.
        """
        return OnnxRuntimeContext(self, capacity, prefix_blocks, padding or self.default_padding, loops_as_rows)


class OnnxRuntimeContext:
    """KV caches and states in host memory, and the steps bound to them."""

    def __init__(
        self, backend: OnnxRuntimeBackend, capacity: int, prefix_blocks: int, padding: RowPadding, loops_as_rows: bool = False
    ) -> None:
        self.backend, self.capacity, self.layers_launched = backend, capacity, 0
        self.padding, self.position_offsets, self.adapters = padding, [0] * capacity, [0] * capacity
        self.every_layer: Sequence[str] = backend.every_layer
        self.packs_steps, self.has_draft_head, head = backend.packs_steps, DRAFT in backend.layers, backend.manifest.draft_head
        self.has_draft_cache = self.has_draft_head and head is not None and head.kv is not None
        self.loops = backend.manifest.model.loops if loops_as_rows else 1
        self.caches = KVCaches(
            backend.manifest, backend.cache_dtype, capacity, padding.sequence.most_added, self.loops, self.has_draft_head
        )
        self.ends = RowEnds(capacity, self.caches.limit, padding.sequence)
        self.recurrent: RecurrentStates | None = None
        self.prefix_blocks = PrefixBlocks(self.caches, prefix_blocks, self.ends) if prefix_blocks else None
        self.snapshots: StateSnapshots | None = None
        if backend.manifest.is_recurrent:
            self.recurrent = RecurrentStates(backend.manifest, capacity, backend.operands)
            memory = StateMemory.of(backend.kv_bytes_per_token, backend.state_bytes)
            self.snapshots = StateSnapshots(self.recurrent, prefix_blocks // memory.snapshot_blocks) if prefix_blocks else None
        self.buffers = StepBuffers(backend.manifest, backend.dtype, backend.logits_dtype)
        self._steps: OrderedDict[StepShape, _BoundStep] = OrderedDict()
        self._loop_steps: OrderedDict[StepShape, _BoundLoopStep] = OrderedDict()
        self._latest: tuple[tuple[int, list[int], list[int]], _BoundStep] | None = None
        self._bound_caches: dict[tuple[int, int], dict[str, ort.OrtValue]] = {}

    def step(self, first_index: int, counts: Sequence[int], wanted: Sequence[int] = ()) -> Step:
        key = (first_index, counts, wanted or [])
        if self._latest is not None and self._latest[0] == key:  # consecutive decode steps have the same counts
            return self._latest[1]
        shape = StepShape.of(*key, self.padding)
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = _BoundStep(self, shape)
            if len(self._steps) > _KEPT_STEPS:
                self._steps.popitem(last=False)
        else:
            self._steps.move_to_end(shape)
        step.arrange(counts, wanted)
        self._latest = (first_index, list(counts), list(wanted)), step
        return step

    def loop_step(self, first_index: int, counts: Sequence[int], wanted: Sequence[int]) -> LoopStep:
        shape = StepShape.of(first_index, counts, wanted, self.padding)
        step = self._loop_steps.get(shape)
        if step is None:
            step = self._loop_steps[shape] = _BoundLoopStep(self, shape)
            if len(self._loop_steps) > _KEPT_STEPS:
                self._loop_steps.popitem(last=False)
        else:
            self._loop_steps.move_to_end(shape)
        step.arrange(counts, wanted)
        return step

    def loops_fit(self, counts: Sequence[int], slots: Sequence[int]) -> bool:
        return max(slots) + self.padding.sequence.up(max(counts)) <= self.caches.limit

    def count(self, graph: str) -> None:
        """Count one launch of ``graph``. Launches are counted here only."""
        self.backend.launches[graph] += 1
        self.layers_launched += self.backend.layers[graph]

    def bound_caches(self, first_index: int, batch_size: int) -> dict[str, ort.OrtValue]:
        """Name → OrtValue of the caches of consecutive rows."""
        key = (first_index, batch_size)
        if key not in self._bound_caches:
            part, arrays = slice(first_index, first_index + batch_size), self.caches.arrays.items()
            bound = {name: ort.OrtValue.ortvalue_from_numpy(array[part]) for name, array in arrays}
            for layer, source in self.backend.manifest.kv_sources.items():  # it writes what the source wrote, in place
                for kind in ("key", "value"):
                    bound[f"{kind}_cache_{layer}"] = bound[f"{kind}_cache_{source}"]
            self._bound_caches[key] = bound
        return self._bound_caches[key]

    def fits_together(self, first_index: int, counts: Sequence[int], num_cached_tokens: Sequence[int]) -> bool:
        return self.loops == 1 and self.ends.fit(first_index, counts, num_cached_tokens)

    def cut_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        if self.recurrent is not None:
            self.recurrent.cut_rows(rows, lengths, self._advance_session)

    def _advance_session(self) -> ort.InferenceSession:
        self.count(ADVANCE)
        return self.backend.session(ADVANCE)

    def forget_row(self, row: int, tainted: bool = False) -> None:
        self.ends.release(row)
        if self.recurrent is not None:
            self.recurrent.forget_row(row)
        if tainted:
            self.caches.release(row)

    def release_row(self, row: int) -> None:
        self.caches.release(row)
        if self.recurrent is not None:
            self.recurrent.release_row(row)

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        self.caches.move_row(source, target, num_cached_tokens)
        if self.recurrent is not None:
            self.recurrent.move_row(source, target)
        self.ends.move(source, target, num_cached_tokens)

    def close(self) -> None:
        self._steps.clear()
        self._loop_steps.clear()
        self._bound_caches.clear()
        self._latest = None
        if self.prefix_blocks is not None:
            self.prefix_blocks.close()
        if self.snapshots is not None:
            self.snapshots.close()
        if self.recurrent is not None:
            self.recurrent.close()
        self.caches.close()


class _BoundStep:
    """Arrays of one step shape, and an IO binding per form, created when first run. Graphs take packed tokens, [1, T, …]."""

    def __init__(self, context: OnnxRuntimeContext, shape: StepShape) -> None:
        self.shape, self.positions = shape, StepPositions(shape, context.padding.sequence)
        arrays = context.buffers.views(shape)
        self.input_ids, self.hidden, self.logits, self.token, self.score, self.before, self.states = arrays
        self.adapter_rows = np.zeros(shape.tokens, np.int64)
        self._context = context
        self._counts: Sequence[int] = []
        self._wanted: Sequence[int] = []
        self._is_scattered = False
        self._step_states = _NO_STATES
        self._runs: dict[tuple[str, StepStates], Callable[[], None]] = {}

    def arrange(self, counts: Sequence[int], wanted: Sequence[int]) -> None:
        self._counts, self._wanted = counts, wanted
        self.positions.arrange(counts, wanted)

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        context, shape = self._context, self.shape
        self.place_pairs(num_cached_tokens)
        if context.recurrent is not None:
            rows = shape.first_index, self._counts, num_cached_tokens, self._wanted
            self._step_states = context.recurrent.begin(*rows, tokens=shape.tokens)

    def place_pairs(self, slots: Sequence[int]) -> None:
        context, shape = self._context, self.shape
        starts = context.ends.extend(shape.first_index, self._counts, slots)
        self._check_room(max(starts) + shape.seq)
        self._step_states = _NO_STATES
        self.positions.place(starts, context.position_offsets[shape.first_index :][: shape.batch_size])
        self._is_scattered = False

    def _check_room(self, needed: int) -> None:
        if needed > self._context.caches.limit:
            raise cache_full(needed, self._context.caches.limit)

    def place_scattered(self, slot: int, positions: NDArray[np.int64], before: NDArray[np.int64] | None = None) -> None:
        if before is not None and not self._context.backend.takes_any_order():
            raise ParamsError(
                "prefill_exit puts prompt tokens into the cache in another order, and sliding windows and int8 caches "
                "go by that order; leave prefill_exit out"
            )
        self._check_room(slot + self.shape.seq)
        self.positions.place_scattered(slot, positions)
        self._is_scattered = True
        if before is not None:
            self._bias.fill_scattered(before, positions)

    def run_all(self, graphs: Sequence[str]) -> None:
        for graph in graphs:
            self.run(graph)

    def run(self, graph: str) -> None:
        self._context.count(graph)
        form = self._form(graph)
        try:
            run = self._runs.get((form, self._step_states))
            if run is None:
                run = self._runs[form, self._step_states] = self._bind(graph, form)
            run()
        except BundleError:
            raise
        except Exception as error:  # ONNX Runtime raises RuntimeError and unrelated classes
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot run {graph} ({error}); export the bundle again") from error

    def _form(self, graph: str) -> str:
        """The form of ``graph`` that runs this step as placed."""
        if self._context.backend.adapted and graph == self._context.every_layer[0] and (adapted := self._place_adapters()):
            return adapted
        return batched_graph(graph) if self._is_scattered and self._context.backend.layers[graph] else graph

    def _place_adapters(self) -> str | None:
        """Fill in the adapter of each token. Returns the form of the graph that has them all; None: no token has one."""
        first = self.shape.first_index
        rows = np.repeat(self._context.adapters[first : first + len(self._counts)], self._counts)
        used = set(rows.tolist()) - {0}
        form = adapted_form(*used)
        if form not in self._context.backend.adapted:
            form = ADAPTED
        self.adapter_rows[: len(rows)], self.adapter_rows[len(rows) :] = rows if form == ADAPTED else rows > 0, 0
        return form if used else None

    def _bind(self, graph: str, form: str) -> Callable[[], None]:
        backend = self._context.backend
        session = backend.adapted.get(form) or backend.session(form)
        rows, recurrent = (self.shape.first_index, self.shape.batch_size), self._context.recurrent
        read = written = self._bound_caches()
        arrays = self._arrays(graph)
        if form == batched_graph(graph):
            arrays[ATTENTION_BIAS] = self._bias.array
        if recurrent is not None:
            read, written = (read | recurrent.bound(half, *rows) for half in self._step_states[:2])
            arrays |= recurrent.operands(self._step_states, self.shape.tokens)
        binding = session.io_binding()
        for value in session.get_inputs():
            array = arrays.get(value.name)
            bound = read[value.name] if array is None else ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(value.name, bound)
        for value in session.get_outputs():
            array = arrays.get(value.name)
            if value.name == PACKED_OUTPUT or (array is None and value.name.startswith("undo_")):
                continue
            in_place = read_name(value.name)
            bound = written[in_place] if array is None else ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_output(value.name, bound)
        names = {value.name for value in session.get_outputs()}
        if "logits" in names and "token" not in names:
            return lambda: self._run_and_pick(session, binding, arrays["logits"][0], arrays["token"][0])
        return lambda: session.run_with_iobinding(binding)

    def _bound_caches(self) -> dict[str, ort.OrtValue]:
        return self._context.bound_caches(self.shape.first_index, self.shape.batch_size)

    @staticmethod
    def _run_and_pick(
        session: ort.InferenceSession, binding: ort.IOBinding, logits: NDArray[Any], token: NDArray[np.int64]
    ) -> None:
        session.run_with_iobinding(binding)
        np.argmax(logits, -1, out=token)

    def _arrays(self, graph: str) -> dict[str, NDArray[Any]]:
        """The step's arrays by graph input and output name."""
        manifest, shape = self._context.backend.manifest, self.shape
        reads, writes = hidden_states(manifest, graph)
        outputs = shape.tokens if graph == HEAD else shape.outputs
        of_all = graph == UNCUT and manifest.draft_head is not None and manifest.draft_head.kv is not None
        return {
            "input_ids": self.input_ids[None],
            "hidden": self.hidden[reads][None],
            "hidden_out": self.hidden[writes][None],
            "logits": self.logits[None, :outputs],
            "token": self.token[None, :outputs],
            "score": self.score[None, : outputs if graph == DRAFT else shape.tokens],
            "before": self.before[None, : shape.tokens],
            ADAPTER_ROWS: self.adapter_rows[None],
            STATES: self.states[None, : shape.tokens if of_all else outputs],
            **self.positions.arrays,
            "position_ids": self.positions.arrays["position_ids"][None],
        }

    @cached_property
    def _bias(self) -> AttentionBias:
        """The mask of scattered tokens."""
        return AttentionBias.named(ATTENTION_BIAS, self.shape.batch_size, self.shape.seq, self._context.caches.slots)


class _BoundLoopStep(_BoundStep):
    """A step of one loop's graph, whose rows are (sequence, loop)."""

    def __init__(self, context: OnnxRuntimeContext, shape: StepShape) -> None:
        super().__init__(context, shape)
        size = shape.tokens, context.backend.manifest.model.hidden_size
        self.before_loop, self.after_loop = (np.zeros(size, context.backend.dtype) for _ in range(2))
        self.first_loop = np.zeros((shape.tokens, 1), np.bool_)

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        self._check_room(max(num_cached_tokens) + self.shape.seq)
        for row, (count, slot) in enumerate(zip(self._counts, num_cached_tokens, strict=True), self.shape.first_index):
            if count:
                self._context.ends.reach(row // self._context.loops, slot + count)
        self.positions.place(num_cached_tokens)

    def _bound_caches(self) -> dict[str, ort.OrtValue]:
        rows = slice(self.shape.first_index, self.shape.first_index + self.shape.batch_size)
        return {name: ort.OrtValue.ortvalue_from_numpy(array[rows]) for name, array in self._context.caches.by_loop.items()}

    def _arrays(self, graph: str) -> dict[str, NDArray[Any]]:
        own = {"hidden": self.before_loop, "hidden_out": self.after_loop, "first_loop": self.first_loop}
        return super()._arrays(graph) | {name: array[None] for name, array in own.items()}
