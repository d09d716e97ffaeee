"""A backend over `TinyTransformer` that shows every read of what it should not read.

It does what the segment contract says and no more: rows that carry garbage carry large numbers, a step fetched anew has
forgotten what it held, a write behind the end of the cache fails, and every launch is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from runtime.tiny_transformer import HIDDEN, Array, TinyTransformer
from tide_runtime.backends.graph_contract import hidden_states
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.backends.step_arrays import NO_PADDING, RowEnds
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import (
    HEAD,
    LOOP,
    SCHEMA_VERSION,
    GenerationInfo,
    GraphInfo,
    KVInfo,
    LayerInfo,
    Manifest,
    ModelInfo,
    TensorInfo,
    exit_graph,
)

GARBAGE = 1e3
FORGOTTEN = np.linspace(GARBAGE, -GARBAGE, HIDDEN)
Script = Callable[[str, Array], Array]  # exit graph and states [T, H] → scores [T]


def tiny_manifest(
    model: TinyTransformer, checkpoints: Sequence[int], exits: Sequence[ExitInfo] = (), draft_limit: int = 4, loops: int = 1
) -> Manifest:
    """The manifest of a bundle of ``model`` cut at ``checkpoints``, with ``exits``; its layers count as those of ``loops``."""
    layers = len(model.strengths)
    edges = [0, *checkpoints, layers]
    graphs = [GraphInfo(f"segment_{i}", [edges[i], edges[i + 1]], 0, [], []) for i in range(len(edges) - 1)]
    graphs += [GraphInfo(exit_graph(e), None, 0, [], []) for e in exits if e.graph_outputs()]
    return Manifest(
        schema=SCHEMA_VERSION,
        created="",
        tools={},
        model=ModelInfo("tiny", "tiny", None, "Tiny", "tiny", layers, HIDDEN, model.vocab, 0, 0, "", loops),
        dtype="fp32",
        max_seq_len=model.positions,
        checkpoints=list(checkpoints),
        layers=[LayerInfo(KVInfo(1, HIDDEN, HIDDEN))] * layers,
        graphs=[*graphs, GraphInfo(HEAD, None, 0, [TensorInfo("hidden", "fp32", ["batch", "seq", HIDDEN])], [])],
        targets={},
        generation=GenerationInfo([]),
        calibration=CalibrationInfo(list(exits), draft_limit, "exact"),
    )


class NumpyBackend:
    """``script`` answers for the MLP routers, when given."""

    name, row_padding, has_prefix_blocks, private_weights = "numpy", NO_PADDING, True, ""
    state_bytes = 0

    def __init__(
        self, manifest: Manifest, model: TinyTransformer, script: Script | None = None, packs_steps: bool = True
    ) -> None:
        self.manifest, self.model, self.script, self.packs_steps = manifest, model, script, packs_steps
        self.kv_bytes_per_token = 2 * manifest.model.num_layers * HIDDEN * 8
        self.exits = {exit_graph(e): e for e in (manifest.calibration.exits if manifest.calibration else [])}
        self.layers = {g.name: range(*g.layers) for g in manifest.segments if g.layers}
        self.launches: dict[str, int] = Counter()

    def with_bits(self, bits: str) -> NumpyBackend:
        return self

    def without_draft_head(self) -> NumpyBackend:
        return self

    def context(self, capacity: int, prefix_blocks: int = 0) -> NumpyContext:
        return NumpyContext(self, capacity, prefix_blocks)


class NumpyContext:
    """KV caches ``keys``, ``values``: [L, capacity, Smax, H]."""

    def __init__(self, backend: NumpyBackend, capacity: int, prefix_blocks: int = 0) -> None:
        self.backend, self.capacity, self.layers_launched = backend, capacity, 0
        self.packs_steps, self.has_draft_head = backend.packs_steps, False
        self.prefix_blocks = NumpyPrefixBlocks(self, prefix_blocks) if prefix_blocks else None
        self.ends = RowEnds(capacity, backend.manifest.max_seq_len)
        self.every_layer: Sequence[str] = [segment.name for segment in backend.manifest.segments]
        shape = (backend.manifest.model.num_layers, capacity, backend.manifest.max_seq_len, HIDDEN)
        self.keys, self.values = np.full(shape, GARBAGE), np.full(shape, -GARBAGE)
        self._latest: NumpyStep | None = None

    def step(self, first_row: int, counts: Sequence[int], num_logits: Sequence[int] = ()) -> NumpyStep:
        assert min(counts) >= 0 < max(counts) and 0 <= first_row <= self.capacity - len(counts)
        assert not num_logits or all(0 <= few <= many for few, many in zip(num_logits, counts, strict=True))
        if self._latest is not None:
            self._latest.forget()  # steps may share their memory
        self._latest = NumpyStep(self, first_row, counts, num_logits or [0] * len(counts))
        return self._latest

    def loop_step(self, first_row: int, counts: Sequence[int], num_logits: Sequence[int]) -> NumpyLoopStep:
        return NumpyLoopStep(self, first_row, counts, num_logits)

    def loops_fit(self, counts: Sequence[int], slots: Sequence[int]) -> bool:
        return max(slots) + max(counts) <= self.ends.limit

    @property
    def loops(self) -> int:
        return self.backend.manifest.model.loops

    def fits_together(self, first: int, counts: Sequence[int], lengths: Sequence[int]) -> bool:
        return self.loops == 1 and self.ends.fit(first, counts, lengths)

    snapshots = None

    def cut_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        pass

    def forget_row(self, row: int, tainted: bool = False) -> None:
        self.release_row(row)

    def release_row(self, row: int) -> None:
        self.keys[:, row], self.values[:, row] = GARBAGE, -GARBAGE
        self.ends.release(row)

    def move_row(self, source: int, target: int, length: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target, :length] = cache[:, source, :length]
            cache[:, target, length:] = cache[:, source] = GARBAGE
        self.ends.move(source, target, length)

    def close(self) -> None:
        self._latest = None


class NumpyPrefixBlocks:
    """Blocks of a prefix cache; a block that was given back holds garbage."""

    def __init__(self, context: NumpyContext, blocks: int) -> None:
        layers = context.backend.manifest.model.num_layers
        self._context, self._kept = context, np.full((2, blocks, layers, BLOCK_TOKENS, HIDDEN), GARBAGE)

    def save(self, row: int, first: int, ids: Sequence[int]) -> None:
        for place, block in enumerate(ids, first):
            slots = slice(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS)
            self._kept[0, block], self._kept[1, block] = self._context.keys[:, row, slots], self._context.values[:, row, slots]

    def load(self, ids: Sequence[int], row: int) -> None:
        for place, block in enumerate(ids):
            slots = slice(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS)
            self._context.keys[:, row, slots], self._context.values[:, row, slots] = self._kept[:, block]
        self._context.ends.reach(row, len(ids) * BLOCK_TOKENS)

    def release(self, ids: Sequence[int]) -> None:
        self._kept[:, ids] = GARBAGE


class NumpyStep:
    """As long arrays as a backend that rounds their length up may have."""

    def __init__(self, context: NumpyContext, first_row: int, counts: Sequence[int], num_logits: Sequence[int]) -> None:
        manifest, self.tokens = context.backend.manifest, sum(counts)
        self._context, self._first, self._counts, self._num_logits = context, first_row, list(counts), list(num_logits)
        room = self.tokens if len(counts) * max(counts) == self.tokens else self.tokens + 3
        self.input_ids = np.zeros(room, np.int64)
        self.hidden: list[NDArray[np.generic]] = [np.zeros((room, HIDDEN)) for _ in manifest.segments]
        self.logits = np.zeros((room, manifest.model.vocab_size))
        self.token = np.zeros(room, np.int64)
        self.score = np.zeros(room)
        self.forget()

    def forget(self) -> None:
        self.input_ids[:], self.token[:], self.score[:], self.logits[:] = 0, -1, 1.0, GARBAGE
        for hidden in self.hidden:
            hidden[:] = FORGOTTEN
        self._places: list[int] | None = None

    def place(self, lengths: Sequence[int]) -> None:
        seq, slots = max(self._counts), self._context.backend.manifest.max_seq_len
        assert len(lengths) == len(self._counts) and all(0 <= n <= slots - seq for n in lengths), f"{lengths} + {seq} of {slots}"
        self._places = self._context.ends.extend(self._first, self._counts, lengths)

    def run_all(self, graphs: Sequence[str]) -> None:
        for graph in graphs:
            self.run(graph)

    def run(self, graph: str) -> None:
        backend = self._context.backend
        backend.launches[graph] += 1
        if graph in backend.layers:
            self._segment(graph, backend.layers[graph])
        elif graph == HEAD:
            self._head(np.asarray(self.hidden[-1][: self.tokens], np.float64))
        else:
            self._exit(graph, backend.exits[graph])

    def _head(self, states: Array) -> None:
        self.logits[: len(states)] = self._context.backend.model.logits(states)
        self.token[: len(states)] = self.logits[: len(states)].argmax(-1)

    def _segment(self, graph: str, layers: range) -> None:
        """Row by row, and garbage behind the tokens of rows that have fewer than the longest."""
        assert self._places is not None, f"{graph} was run before place()"
        context = self._context
        context.layers_launched += len(layers)
        reads, writes = hidden_states(context.backend.manifest, graph)
        begin, logits_of = 0, []
        for row, (place, count, num_logits) in enumerate(zip(self._places, self._counts, self._num_logits, strict=True)):
            end = begin + count
            self._spoil(layers, row, place + count, place + max(self._counts))
            states = self._layers(layers, self._first + row, place, slice(begin, end), reads)
            if layers.stop == context.backend.manifest.model.num_layers:
                logits_of += list(states[count - num_logits :])
            else:
                self.hidden[writes][begin:end] = states
            begin = end
        if logits_of:
            self._head(np.stack(logits_of))

    def _spoil(self, layers: range, row: int, begin: int, end: int) -> None:
        """Garbage behind the tokens of a row that has fewer than the longest."""
        self._context.keys[layers, self._first + row, begin:end] = GARBAGE
        self._context.values[layers, self._first + row, begin:end] = -GARBAGE

    def _layers(self, layers: range, row: int, place: int, tokens: slice, reads: int) -> Array:
        """States of one row's tokens after ``layers``; their keys and values go into its cache."""
        context, model = self._context, self._context.backend.model
        positions = place + np.arange(tokens.stop - tokens.start)
        visible = np.arange(context.keys.shape[2]) <= positions[:, None]
        ids, states = self.input_ids[tokens], np.array(self.hidden[reads][tokens], np.float64)
        hidden = model.embed(ids, positions) if layers.start == 0 else states
        for layer in layers:
            context.keys[layer, row, positions], context.values[layer, row, positions] = model.project(layer, hidden)
            hidden = model.layer(layer, hidden, context.keys[layer, row], context.values[layer, row], visible)
        return hidden

    def _exit(self, graph: str, info: ExitInfo) -> None:
        backend = self._context.backend
        reads, writes = hidden_states(backend.manifest, graph)
        state = np.array(self.hidden[reads][: self.tokens], np.float64)
        if info.has_mlp:
            scores = backend.script(graph, state) if backend.script else backend.model.score(info.checkpoint, state)
            self.score[: self.tokens] = scores
        if info.head != "identity":
            self.hidden[writes][: self.tokens] = backend.model.translated(info.checkpoint, state)


class NumpyLoopStep:
    """One loop's layers for tokens of rows (sequence, loop); see `LoopStep`."""

    def __init__(self, context: NumpyContext, first_row: int, counts: Sequence[int], num_logits: Sequence[int]) -> None:
        assert all(0 <= few <= many for few, many in zip(num_logits, counts, strict=True)) and max(counts) > 0
        self._context, self._first, self._counts, self._num_logits = context, first_row, counts, num_logits
        room = sum(counts) + 3
        self.input_ids, self.first_loop = np.zeros(room, np.int64), np.zeros((room, 1), np.bool_)
        self.before_loop, self.after_loop = np.full((room, HIDDEN), FORGOTTEN), np.full((room, HIDDEN), FORGOTTEN)
        self.logits, self.token = np.full((room, context.backend.model.vocab), GARBAGE), np.full(room, -1)
        self._places: Sequence[int] | None = None

    def place(self, lengths: Sequence[int]) -> None:
        assert self._context.loops_fit(self._counts, lengths), "padding overruns a row"
        self._places = lengths

    def run(self, graph: str) -> None:
        context, backend = self._context, self._context.backend
        assert graph == LOOP and self._places is not None
        backend.launches[graph] += 1
        count_of_loop = backend.manifest.model.num_layers // context.loops
        context.layers_launched += count_of_loop
        begin, logits_of = 0, list[Array]()
        for index, (place, count, num_logits) in enumerate(zip(self._places, self._counts, self._num_logits, strict=True)):
            (row, loop), end = divmod(self._first + index, context.loops), begin + count
            assert (self.first_loop[begin:end] == (loop == 0)).all()
            layers, positions = range(loop * count_of_loop, (loop + 1) * count_of_loop), place + np.arange(count)
            if count:  # and a row of padding; rows without tokens are left alone
                context.keys[layers, row, place + count : place + count + 1] = GARBAGE
            visible = np.arange(context.keys.shape[2]) <= positions[:, None]
            hidden = backend.model.embed(self.input_ids[begin:end], positions) if loop == 0 else self.before_loop[begin:end]
            for layer in layers:
                context.keys[layer, row, positions], context.values[layer, row, positions] = backend.model.project(layer, hidden)
                keys, values = context.keys[layer, row], context.values[layer, row]
                hidden = backend.model.layer(layer, hidden, keys, values, visible) if count else hidden
            self.after_loop[begin:end] = hidden
            logits_of += list(hidden[count - num_logits :])
            begin = end
        if logits_of:
            self.logits[: len(logits_of)] = backend.model.logits(np.stack(logits_of))
            self.token[: len(logits_of)] = self.logits[: len(logits_of)].argmax(-1)
