"""Steps whose tensors stay on a device: the host sends token ids and positions and reads back token ids and scores.

Graphs pass hidden states, logits and caches to each other by device address. A `DeviceBackend` binds a graph to the addresses.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import PrefixRows, uncounted
from tide_runtime.backends.device.arena import Arena, DeviceBuffers, TransferBlock
from tide_runtime.backends.device.control_flow import Enqueue, Launch, Run
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_caches import DeviceCaches
from tide_runtime.backends.device.device_rows import DeviceRows
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, FP32, INT64, ElementType
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.backends.graph_contract import hidden_states, read_name
from tide_runtime.backends.step_arrays import MAX_PADDED_TOKENS, PADDED_TOKENS, RowEnds, StepPositions, StepShape, next_power_of_2
from tide_runtime.bundle.manifest import DRAFT, HEAD, STATES, UNCUT, Manifest
from tide_runtime.errors import DeviceMemoryError
from tide_runtime.sampler import RowSampling

_log = logging.getLogger("tide_runtime")
_KEPT_STEPS = 128  # step shapes whose bindings a context keeps
ON_HOST = "total_sequence_length"  # ONNX Runtime's GroupQueryAttention reads this input on the host, even on a GPU


@dataclass(frozen=True)
class DeviceTensor:
    """Address, shape and type that a graph's input or output is bound to. ``on_host``: the address is in host memory."""

    pointer: int
    shape: tuple[int, ...]
    element: ElementType
    on_host: bool = False


class DeviceBackend(Protocol):
    """Interface of backends whose tensors stay on a device."""

    manifest: Manifest
    device: Device
    layers: dict[str, int]  # graph name → decoder layers it runs; `UNCUT` and `DRAFT` where the target has them
    launches: dict[str, int]
    element: ElementType  # of hidden states
    cache_element: ElementType
    logits_element: ElementType
    fixed_stream: bool  # graphs always run on the device's stream, whatever stream is requested
    no_loop: str | None  # why no loop on the device can run its graphs
    min_slots: int | None  # of the caches that graphs are bound to, see `DeviceCaches`
    step_graphs: StepGraphs  # how whole steps are captured
    row_sampling: RowSampling | None  # draws tokens from logits on the device
    input_types: Mapping[str, ElementType]  # integer inputs whose type differs from that of `StepPositions.arrays`

    def takes(self, rows: int, tokens: int) -> bool:
        """Whether a step of ``rows`` sequences of ``tokens`` tokens can be run."""

    def form(self, graph: str, shape: StepShape) -> str:
        """The compiled form of ``graph`` that runs steps of ``shape``."""

    def bind(self, form: str, step: DeviceStep, graph: str) -> Enqueue:
        """A function that queues ``form`` on a stream, bound to the tensors of ``step``."""


class DeviceContext:
    """KV caches in device memory, and the steps over them.

    ``attached``: objects of backends and policies with the lifetime of this context.
    """

    packs_steps = False
    snapshots = None
    prefix_blocks: PrefixRows | None = None

    def __init__(self, backend: DeviceBackend, capacity: int) -> None:
        self.backend = backend
        self.capacity = capacity
        self.layers_launched = 0
        self.adapters = [0] * capacity  # none of its targets takes any
        self.position_offsets = [0] * capacity  # of none of its targets: they refuse models with two sets of rotary factors
        head = backend.manifest.draft_head if DRAFT in backend.layers else None
        self.has_draft_head = head is not None
        self.has_draft_cache = head is not None and head.kv is not None
        segments = [segment.name for segment in backend.manifest.segments]
        self.every_layer: Sequence[str] = [UNCUT] if UNCUT in backend.layers else segments
        backend.device.use()
        self.caches = DeviceCaches(
            backend.device, backend.manifest, backend.cache_element, capacity, backend.min_slots, self.has_draft_cache
        )
        self.ends = RowEnds(capacity, self.caches.limit)
        self.buffers = DeviceBuffers(backend.device)
        self.attached: dict[Hashable, Any] = {}
        self._steps: OrderedDict[StepShape, DeviceStep] = OrderedDict()

    def step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int] = ()) -> DeviceStep:
        self.backend.device.use()
        padded = self._padded_shape(first_index + len(counts), max(counts))
        shape = padded or StepShape.of(first_index, counts, num_logits)
        step = self._steps.get(shape)
        if step is None:
            graphs = self.backend.step_graphs if padded and self.backend.step_graphs.captures else None
            step = self._steps[shape] = DeviceStep(self, shape, captured=graphs is not None, graphs=graphs)
            if len(self._steps) > _KEPT_STEPS:  # prompts have many lengths
                del self._steps[next(shape for shape, step in self._steps.items() if not step.captured)]
        self._steps.move_to_end(shape)
        step.begin(counts, num_logits, first_index)
        return step

    def _padded_shape(self, rows: int, tokens: int) -> StepShape | None:
        """The one of few shapes that takes up to ``tokens`` tokens of each of the first ``rows`` rows: each takes a CUDA graph,
        and padding takes little time. None: the step is large, or padding would overrun a row."""
        rows = min(self.capacity, next_power_of_2(rows))
        tokens = next_power_of_2(tokens)
        fits = tokens <= PADDED_TOKENS[-1] and rows * tokens <= MAX_PADDED_TOKENS and self.backend.takes(rows, tokens)
        return StepShape.padded(rows, tokens) if fits and max(self.ends.ends[:rows]) + tokens <= self.caches.limit else None

    def capture_passes(self, longest: int) -> None:
        """Capture passes through all layers of up to ``longest`` tokens a sequence, before anything is cached.

        A graph is captured when its kernels have run: what they allocate and load for the first time a capture must not. The
        largest steps come first, whose buffers the others share.
        """
        began = perf_counter()
        before = self.backend.device.free_memory()
        captured = self.backend.step_graphs.captured
        batches = sorted({min(self.capacity, next_power_of_2(rows + 1)) for rows in range(self.capacity)}, reverse=True)
        sizes = [tokens for tokens in reversed(PADDED_TOKENS) if tokens < 2 * longest]
        with uncounted(self.backend.launches):
            for rows, tokens in product(batches, sizes):
                if self.backend.step_graphs.captures and self._padded_shape(rows, tokens) is not None:
                    with suppress(DeviceMemoryError):  # such steps are refused when they are needed, or run with fewer rows
                        self._run_idle(rows, tokens)
        self.backend.device.synchronize()
        after = self.backend.device.free_memory()
        taken = "" if before is None or after is None else f", {max(0, before - after) / 2**20:.0f} MiB"
        count = self.backend.step_graphs.captured - captured
        _log.info("captured %d steps as CUDA graphs: %.1f s%s", count, perf_counter() - began, taken)

    def _run_idle(self, rows: int, tokens: int) -> None:
        """Run a pass until it is captured, over rows that nothing uses."""
        counts = [tokens] * rows
        try:
            for _ in range(2):
                step = self.step(0, counts, counts)
                step.input_ids[:] = 0
                step.place([0] * rows)
                step.run_all(self.every_layer)
        finally:
            for row in range(rows):
                self.forget_row(row)

    def fits_together(self, first_index: int, counts: Sequence[int], num_cached_tokens: Sequence[int]) -> bool:
        takes = self.backend.takes(len(counts), max(counts))
        return takes and self.ends.fit(first_index, counts, num_cached_tokens)

    def release_row(self, row: int) -> None:
        """Do nothing: rows keep the memory that they have got."""

    def cut_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Do nothing: keys and values are written again, and models with states are refused."""

    def forget_row(self, row: int, tainted: bool = False) -> None:
        self.ends.release(row)
        if tainted:
            self.backend.device.use()
            self.caches.clear_row(row)
        if not any(self.ends.ends):
            self.caches.shrink()

    def close(self) -> None:
        """Break the reference cycles between this context, its steps and attached objects, which would keep the caches alive."""
        self.prefix_blocks = None
        self.attached.clear()
        self._steps.clear()

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        self.backend.device.use()
        self.caches.move_row(source, target, num_cached_tokens)
        self.ends.move(source, target, num_cached_tokens)

    def count(self, graph: str, times: int = 1) -> None:
        """Count launches of ``graph``. Launches are counted here only."""
        self.backend.launches[graph] += times
        self.layers_launched += times * self.backend.layers[graph]


class DeviceStep:
    """A step of one shape. `send` and `run` queue work; reading results synchronizes. `tensors`: what graphs are bound to.

    Args:
        buffers: separate memory for graph outputs, when other steps must not overwrite them; default: the context's.
        captured: the step becomes part of a CUDA graph, so backends must not share objects with other steps.
        graphs: captures what `run_all` runs; otherwise a captured step is part of a loop's graph.
    """

    def __init__(
        self,
        context: DeviceContext,
        shape: StepShape,
        buffers: DeviceBuffers | None = None,
        captured: bool = False,
        graphs: StepGraphs | None = None,
    ) -> None:
        backend = self._backend = context.backend
        self.captured, self._graphs = captured, graphs
        self._passes: dict[tuple[str, ...], Launch | None] = {}  # graphs that `run_all` ran → their capture, or None
        self.attached: dict[Hashable, Any] = {} if captured else context.attached
        self.context = context
        self.shape = shape
        self.positions = StepPositions(shape)
        self._buffers = buffers or context.buffers
        self._padded = not shape.even
        self.places = shape.batch_size * shape.seq if self._padded else shape.tokens
        self._ids = np.zeros(shape.tokens, np.int64)
        sent = {"input_ids": ((self.places,), np.dtype(np.int64))}
        sent |= {name: (a.shape, a.dtype) for name, a in self.positions.arrays.items() if name != ON_HOST}
        types = {name: np.dtype(kind.host) for name, kind in backend.input_types.items()}
        self.block = TransferBlock(backend.device, {name: (size, types.get(name, dtype)) for name, (size, dtype) in sent.items()})
        self._runs: dict[str, Enqueue] = {}
        self._slots = context.caches.slots  # of the caches that `_runs` are bound to
        self._arena = self._buffers.get(**self._sizes())
        self._head_logits: Arena | None = None
        self._before = 0
        self._counts: Sequence[int] = ()
        self._read_back: dict[str, NDArray[Any]] = {}  # pinned host copies of outputs
        self._fresh: set[str] = set()  # names in `_read_back` that are up to date
        self._sent, self._latest = False, ""  # graph that ran last
        self.hidden = self._hidden_rows(None)

    def begin(self, counts: Sequence[int], num_logits: Sequence[int], first_index: int) -> None:
        """Start a step of ``counts`` tokens per sequence, from batch index ``first_index`` on, after which the host arrays may be
        filled."""
        self._before = first_index - self.shape.first_index
        self._sent = False
        self._counts = self._of_every_row(counts)
        self.block.wait_until_writable()
        self.positions.arrange(self._counts, self._of_every_row(num_logits) if num_logits else ())
        if self._padded:
            self.hidden = self._hidden_rows(self._packed_from.tolist())

    def _of_every_row(self, values: Sequence[int]) -> list[int]:
        """``values`` of the sequences, and 0 of the shape's other rows."""
        return [*[0] * self._before, *values, *[0] * (self.shape.batch_size - self._before - len(values))]

    @property
    def _packed_from(self) -> NDArray[np.int64]:
        """[T] index of each packed token among the padded ones."""
        return self.positions.arrays["packed_from"][0]

    @property
    def input_ids(self) -> NDArray[np.int64]:
        return self._ids if self._padded else self.block.host["input_ids"]

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        cached = self._of_every_row(num_cached_tokens)
        num_cached_tokens = self.context.ends.extend(self.shape.first_index, self._counts, cached)
        rows = self.shape.first_index + self.shape.batch_size
        self.context.caches.reserve(max(num_cached_tokens) + self.shape.seq, rows)
        self.positions.place(num_cached_tokens)
        self._sent = False

    place_pairs = place

    def assume_full_caches(self) -> None:
        """Set the host-side input that kernels size their work by to its maximum, because a device loop advances the sequences
        without the host."""
        self.positions.arrays[ON_HOST][...] = self.context.caches.slots

    def run_all(self, graphs: Sequence[str]) -> None:
        if self._graphs is not None:
            self.assume_full_caches()
        self._follow_caches()
        names = tuple(graphs)
        launch = self._captured_pass(self._graphs, names) if self._graphs is not None else None
        if launch is None:
            for graph in graphs:
                self.run(graph)
            return
        for graph in graphs:
            self.context.count(graph)
        if not self._sent:
            self.send()
        self._fresh.clear()
        self._latest = graphs[-1]
        launch(1)

    def _captured_pass(self, step_graphs: StepGraphs, names: tuple[str, ...]) -> Launch | None:
        """The capture of graphs ``names``, made the second time, when all of them have run; None: they are run one by one."""
        if names not in self._passes:
            self._passes[names] = None
        elif self._passes[names] is None:
            fixed = self._backend.fixed_stream
            self._passes[names] = step_graphs.capture([Run(name, partial(self.enqueue, name), fixed) for name in names])
        return self._passes[names]

    def run(self, graph: str) -> None:
        self.context.count(graph)
        if not self._sent:
            self.send()
        self.enqueue(graph)

    def enqueue(self, graph: str, stream: int | None = None) -> None:
        """Queue one graph without sending inputs, on the device's stream unless another is given."""
        form = self._backend.form(graph, self.shape)
        self._follow_caches()
        self._fresh.clear()
        self._latest = graph
        with self._backend.device.lock:
            if form not in self._runs:
                self._runs[form] = self._backend.bind(form, self, graph)
            self._runs[form](self._backend.device.stream if stream is None else stream)

    def send(self) -> None:
        """Queue the copy of token ids and positions to the device."""
        self._follow_caches()
        self.block.wait_until_writable()
        if self._padded:
            self.block.host["input_ids"][:] = self._ids[self.positions.arrays["padded_from"].ravel()]
        for name, array in self.positions.arrays.items():
            if name != ON_HOST:
                self.block.host[name][...] = array
        if self._padded:
            self.block.host["logits_index"][...] = self._packed_from[self.positions.arrays["logits_index"]]
        self.block.send()
        self._sent = True

    def _follow_caches(self) -> None:
        """Forget what is bound to the caches when the number of slots has changed."""
        if self._slots != self.context.caches.slots:
            assert not self.captured or self._graphs is not None, "a loop keeps the caches that its graph was captured with"
            self._passes.clear()
            self._slots = self.context.caches.slots
            self._runs.clear()

    @property
    def token(self) -> NDArray[np.int64]:
        """[N]; reading synchronizes."""
        return self._packed("token", self._read("token", INT64, self._token_capacity))

    @property
    def _token_capacity(self) -> int:
        return max(self.shape.outputs, self.places)

    @property
    def score(self) -> NDArray[np.float32]:
        """[T], or [N] of ``draft``; reading synchronizes."""
        return self._packed("score", self._read("score", FP32, self._token_capacity))

    def _packed(self, name: str, found: NDArray[Any]) -> NDArray[Any]:
        """Output ``name`` of the last graph, without padding."""
        return found[self._packed_from] if self._padded and self._gives_all(self._latest, name) else found

    def _gives_all(self, graph: str, name: str) -> bool:
        """Whether ``graph`` gives output ``name`` of all tokens, not only of those whose logits are wanted."""
        if graph == DRAFT:
            return not self.context.has_draft_cache
        return graph == HEAD or name == "score" or (name == STATES and self.context.has_draft_cache)

    @property
    def logits(self) -> DeviceRows:
        """[N, V] of the last graph; copied to the host only when converted to a NumPy array."""
        element = self._backend.logits_element
        vocab = self._backend.manifest.model.vocab_size
        device = self._backend.device
        arena = self._arena
        if self._latest != HEAD:
            pointer = arena.pointers["logits"]
            rows = self.shape.outputs
            places = None
        else:
            arena = self._head_arena()
            pointer = arena.pointer
            rows = self.shape.tokens
            places = self._packed_from.tolist() if self._padded else None
        return DeviceRows(device, pointer, (rows, vocab), element, arena, places, self._backend.row_sampling)

    def address(self, name: str) -> int:
        """Device address of ``token`` [N] or ``score`` [T or N]."""
        return self._arena.pointers[name]

    def tensors(self, graph: str, names: Sequence[str]) -> dict[str, DeviceTensor]:
        """Inputs and outputs ``names`` of ``graph``; tokens are [B, S, …]."""
        tokens = self.shape.batch_size, self.shape.seq
        return {name: self._tensor(graph, tokens, name) for name in names}

    def _tensor(self, graph: str, tokens: tuple[int, int], name: str) -> DeviceTensor:
        shape = self.shape
        model = self._backend.manifest.model
        source = read_name(name)
        reads, writes = hidden_states(self._backend.manifest, graph)
        if source in self.context.caches.shapes:
            dims = (shape.batch_size, *self.context.caches.shapes[source][1:])
            return DeviceTensor(self.context.caches.pointer(source, shape.first_index), dims, self._backend.cache_element)
        if name in ("hidden", "hidden_out"):
            states = self.hidden[reads if name == "hidden" else writes]
            return DeviceTensor(states.pointer, (*tokens, self._backend.manifest.hidden_width), self._backend.element)
        rows = tokens if name == "before" or self._gives_all(graph, name) else (1, shape.outputs)
        if name == "token":
            return DeviceTensor(self.address("token"), rows, INT64)
        if name == "logits":
            pointer = self._head_arena().pointer if graph == HEAD else self._arena.pointers["logits"]
            return DeviceTensor(pointer, (*rows, model.vocab_size), self._backend.logits_element)
        if name == "score":
            return DeviceTensor(self.address("score"), rows, FP32)
        if name in ("before", STATES):
            return DeviceTensor(self._arena.pointers[name], (*rows, self._draft_width), self._backend.element)
        if name == ON_HOST:
            array = self.positions.arrays[name]
            return DeviceTensor(array.ctypes.data, array.shape, ELEMENT_TYPES["int32"], on_host=True)
        sent = "padded_position_ids" if self._padded and name == "position_ids" else name
        array = self.block.host[sent]
        dims = tokens if name in ("input_ids", "position_ids") else array.shape
        return DeviceTensor(self.block.pointers[sent], dims, ELEMENT_TYPES[array.dtype.name])

    def _hidden_rows(self, places: Sequence[int] | None) -> list[DeviceRows]:
        width = self._backend.manifest.hidden_width
        hidden = []
        for number in range(len(self._backend.manifest.segments)):
            pointer = self._arena.pointers[f"hidden_{number}"]
            shape = (self.shape.tokens, width)
            hidden.append(DeviceRows(self._backend.device, pointer, shape, self._backend.element, self._arena, places))
        return hidden

    @property
    def _draft_width(self) -> int:
        """Numbers that the draft head reads of each token; 0: there is no head."""
        head = self._backend.manifest.draft_head
        return head.width if self.context.has_draft_head and head is not None else 0

    @property
    def before(self) -> DeviceRows:
        """[T, D] of the draft head."""
        return self._draft_rows("before", of_all=True)

    @property
    def states(self) -> DeviceRows:
        """[T, D] or [N, D] of the draft head, of the last graph."""
        return self._draft_rows(STATES, self._gives_all(self._latest, STATES))

    def _draft_rows(self, name: str, of_all: bool) -> DeviceRows:
        places = self._packed_from.tolist() if self._padded and of_all else None
        shape = (self.shape.tokens if of_all else self.shape.outputs, self._draft_width)
        return DeviceRows(self._backend.device, self._arena.pointers[name], shape, self._backend.element, self._arena, places)

    def _sizes(self) -> dict[str, int]:
        """Bytes of the graphs' outputs, except the head's logits of every token, which few steps compute."""
        manifest = self._backend.manifest
        state_bytes = self._backend.element.bytes
        read = self._token_capacity * self._draft_width * state_bytes  # by the draft head
        hidden = self.places * manifest.hidden_width * state_bytes
        return {
            **{f"hidden_{number}": hidden for number in range(len(manifest.segments))},
            "logits": self.shape.outputs * manifest.model.vocab_size * self._backend.logits_element.bytes,
            "token": self._token_capacity * INT64.bytes,
            "score": self._token_capacity * FP32.bytes,
            **({"before": read, STATES: read} if read else {}),
        }

    def _head_arena(self) -> Arena:
        if self._head_logits is None:
            row_bytes = self._backend.manifest.model.vocab_size * self._backend.logits_element.bytes
            self._head_logits = self._buffers.get(head_logits=self.places * row_bytes)
        return self._head_logits

    def _read(self, name: str, element: ElementType, count: int) -> NDArray[Any]:
        device = self._backend.device
        if name not in self._read_back:
            self._read_back[name] = device.pinned(count * element.bytes).view(element.host)
        if name not in self._fresh:
            device.download(self._read_back[name], self._arena.pointers[name])
            device.synchronize()
            self._fresh.add(name)
        return self._read_back[name]
