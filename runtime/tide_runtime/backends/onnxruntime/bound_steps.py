"""Steps of target cpu, whose graphs are bound once to the arrays of a step shape, and the context that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.base import LoopStep, Step
from tide_runtime.backends.graph_contract import ADAPTER_ROWS, hidden_states, read_name
from tide_runtime.backends.kv_caches import cache_full
from tide_runtime.backends.onnxruntime.adapted_graph import ADAPTED, adapted_form
from tide_runtime.backends.onnxruntime.host_rows import HostRows, HostSessions
from tide_runtime.backends.onnxruntime.packed_weights import PACKED_OUTPUT
from tide_runtime.backends.recurrent_states import StepStates
from tide_runtime.backends.step_arrays import RowPadding, StepPositions, StepShape
from tide_runtime.bundle.manifest import DRAFT, HEAD, SCORE, STATES, UNCUT
from tide_runtime.errors import BundleError

_NO_STATES = StepStates(0, 0)  # for steps that read no recurrent states
_KEPT_STEPS = 128  # step shapes whose bindings a context keeps; policies that skip layers use many


class BoundStep:
    """Arrays of one step shape, and an IO binding per form, created when first run. Graphs take packed tokens, [1, T, …]."""

    def __init__(self, rows: HostRows, shape: StepShape) -> None:
        self.shape = shape
        self.positions = StepPositions(shape, rows.padding.sequence)
        arrays = rows.buffers.views(shape)
        self.input_ids, self.hidden, self.logits, self.token, self.score, self.before, self.states = arrays
        self.adapter_rows = np.zeros(shape.tokens, np.int64)
        self._rows = rows
        self._counts: Sequence[int] = []
        self._num_logits: Sequence[int] = []
        self._step_states = _NO_STATES
        self._runs: dict[tuple[str, StepStates], Callable[[], None]] = {}

    def arrange(self, counts: Sequence[int], num_logits: Sequence[int]) -> None:
        self._counts, self._num_logits = counts, num_logits
        self.positions.arrange(counts, num_logits)

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        self.place_pairs(num_cached_tokens)
        if self._rows.recurrent is not None:
            texts = self.shape.first_index, self._counts, num_cached_tokens, self._num_logits
            self._step_states = self._rows.recurrent.begin(*texts, tokens=self.shape.tokens)

    def place_pairs(self, slots: Sequence[int]) -> None:
        rows, shape = self._rows, self.shape
        starts = rows.ends.extend(shape.first_index, self._counts, slots)
        self._check_room(max(starts) + shape.seq)
        self._step_states = _NO_STATES
        self.positions.place(starts, rows.position_offsets[shape.first_index :][: shape.batch_size])

    def _check_room(self, needed: int) -> None:
        if needed > self._rows.caches.limit:
            raise cache_full(needed, self._rows.caches.limit)

    def run_all(self, graphs: Sequence[str]) -> None:
        for graph in graphs:
            self.run(graph)

    def run(self, graph: str) -> None:
        self._rows.count(graph)
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
        if self._rows.backend.adapted and graph == self._rows.every_layer[0] and (adapted := self._place_adapters()):
            return adapted
        return graph

    def _place_adapters(self) -> str | None:
        """Fill in the adapter of each token. Returns the form of the graph that has them all; None: no token has one."""
        first = self.shape.first_index
        rows = np.repeat(self._rows.adapters[first : first + len(self._counts)], self._counts)
        used = set(rows.tolist()) - {0}
        form = adapted_form(*used)
        if form not in self._rows.backend.adapted:
            form = ADAPTED
        self.adapter_rows[: len(rows)], self.adapter_rows[len(rows) :] = rows if form == ADAPTED else rows > 0, 0
        return form if used else None

    def _bind(self, graph: str, form: str) -> Callable[[], None]:
        session = self._rows.backend.session(form)
        rows = (self.shape.first_index, self.shape.batch_size)
        recurrent = self._rows.recurrent
        read = written = self._bound_caches()
        arrays = self._arrays(graph)
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
        picks = {value.name for value in session.get_outputs()}.intersection(("logits", "token")) == {"logits"}

        def run() -> None:
            session.run_with_iobinding(binding)
            if picks:
                np.argmax(arrays["logits"][0], -1, out=arrays["token"][0])

        return run

    def _bound_caches(self) -> dict[str, ort.OrtValue]:
        return self._rows.bound_caches(self.shape.first_index, self.shape.batch_size)

    def _arrays(self, graph: str) -> dict[str, NDArray[Any]]:
        """The step's arrays by graph input and output name."""
        manifest = self._rows.backend.manifest
        shape = self.shape
        reads, writes = hidden_states(manifest, graph)
        outputs = shape.tokens if graph == HEAD or graph.startswith(SCORE) else shape.outputs
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


class BoundLoopStep(BoundStep):
    """A step of one loop's graph, whose rows are (sequence, loop)."""

    def __init__(self, rows: HostRows, shape: StepShape) -> None:
        super().__init__(rows, shape)
        size = shape.tokens, rows.backend.manifest.hidden_width
        self.before_loop, self.after_loop = (np.zeros(size, rows.backend.dtype) for _ in range(2))
        self.first_loop = np.zeros((shape.tokens, 1), np.bool_)

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        self._check_room(max(num_cached_tokens) + self.shape.seq)
        for row, (count, slot) in enumerate(zip(self._counts, num_cached_tokens, strict=True), self.shape.first_index):
            if count:
                self._rows.ends.reach(row // self._rows.loops, slot + count)
        self.positions.place(num_cached_tokens)

    def _bound_caches(self) -> dict[str, ort.OrtValue]:
        rows = slice(self.shape.first_index, self.shape.first_index + self.shape.batch_size)
        return {name: ort.OrtValue.ortvalue_from_numpy(array[rows]) for name, array in self._rows.caches.by_loop.items()}

    def _arrays(self, graph: str) -> dict[str, NDArray[Any]]:
        own = {"hidden": self.before_loop, "hidden_out": self.after_loop, "first_loop": self.first_loop}
        return super()._arrays(graph) | {name: array[None] for name, array in own.items()}


class OnnxRuntimeContext(HostRows):
    """Rows of one caller, and the steps over them."""

    packs_steps = True

    def __init__(self, backend: HostSessions, capacity: int, prefix_blocks: int, padding: RowPadding, loops: int) -> None:
        super().__init__(backend, capacity, prefix_blocks, padding, loops)
        self._bound, self._bound_loops = lru_cache(_KEPT_STEPS)(BoundStep), lru_cache(_KEPT_STEPS)(BoundLoopStep)
        self._latest: tuple[tuple[int, list[int], list[int]], BoundStep] | None = None

    def step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int] = ()) -> Step:
        key = (first_index, counts, num_logits or [])
        if self._latest is not None and self._latest[0] == key:  # consecutive decode steps have the same counts
            return self._latest[1]
        step = self._bound(self, StepShape.of(*key, self.padding))
        step.arrange(counts, num_logits)
        self._latest = (first_index, list(counts), list(num_logits)), step
        return step

    def loop_step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int]) -> LoopStep:
        step = self._bound_loops(self, StepShape.of(first_index, counts, num_logits, self.padding))
        step.arrange(counts, num_logits)
        return step

    def loops_fit(self, counts: Sequence[int], slots: Sequence[int]) -> bool:
        return max(slots) + self.padding.sequence.up(max(counts)) <= self.caches.limit

    def close(self) -> None:
        self._bound.cache_clear()
        self._bound_loops.cache_clear()
        self._latest = None
        super().close()
