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
from tide_runtime.backends.interface import hidden_states
from tide_runtime.calibration import CalibrationInfo, ExitInfo
from tide_runtime.manifest import GenerationInfo, GraphInfo, KVInfo, Manifest, ModelInfo, exit_graph

GARBAGE = 1e3
FORGOTTEN = np.linspace(GARBAGE, -GARBAGE, HIDDEN)
Script = Callable[[str, Array], Array]  # exit graph and states [B, S, H] → scores [B, S]


def tiny_manifest(
    model: TinyTransformer, checkpoints: Sequence[int], exits: Sequence[ExitInfo] = (), draft_limit: int = 4
) -> Manifest:
    """The manifest of a bundle of ``model`` cut at ``checkpoints``, with ``exits``."""
    layers = len(model.strengths)
    edges = [0, *checkpoints, layers]
    graphs = [GraphInfo(f"segment_{i}", [edges[i], edges[i + 1]], 0, [], []) for i in range(len(edges) - 1)]
    graphs += [GraphInfo(exit_graph(e), None, 0, [], []) for e in exits if e.graph_outputs()]
    return Manifest(
        schema=1,
        created="",
        tools={},
        model=ModelInfo("tiny", "tiny", None, "Tiny", "tiny", layers, HIDDEN, model.vocab, 0, 0, ""),
        dtype="fp32",
        max_seq_len=model.positions,
        checkpoints=list(checkpoints),
        kv=[KVInfo(1, HIDDEN, HIDDEN)] * layers,
        graphs=[*graphs, GraphInfo("head", None, 0, [], [])],
        targets={},
        generation=GenerationInfo([]),
        calibration=CalibrationInfo(list(exits), draft_limit, "exact"),
    )


class NumpyBackend:
    """``script`` answers for the MLP routers, when given."""

    name = "numpy"

    def __init__(self, manifest: Manifest, model: TinyTransformer, script: Script | None = None) -> None:
        self.manifest, self.model, self.script = manifest, model, script
        self.exits = {exit_graph(e): e for e in (manifest.calibration.exits if manifest.calibration else [])}
        self.layers = {g.name: range(*g.layers) for g in manifest.segments if g.layers}
        self.launches: dict[str, int] = Counter()

    def slots(self, capacity: int) -> NumpySlots:
        return NumpySlots(self, capacity)


class NumpySlots:
    """KV caches ``keys``, ``values``: [L, capacity, Smax, H]."""

    def __init__(self, backend: NumpyBackend, capacity: int) -> None:
        self.backend, self.capacity, self.layers_launched = backend, capacity, 0
        shape = (backend.manifest.model.num_layers, capacity, backend.manifest.max_seq_len, HIDDEN)
        self.keys, self.values = np.full(shape, GARBAGE), np.full(shape, -GARBAGE)
        self._steps: dict[tuple[int, int, int], NumpyStep] = {}
        self._latest: NumpyStep | None = None

    def step(self, first_row: int, rows: int, seq: int) -> NumpyStep:
        assert rows > 0 and seq > 0 and 0 <= first_row <= self.capacity - rows
        key = (first_row, rows, seq)
        if key not in self._steps:
            self._steps[key] = NumpyStep(self, *key)
        step = self._steps[key]
        if step is not self._latest:
            step.forget()
        self._latest = step
        return step

    def move_row(self, source: int, target: int, length: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target, :length] = cache[:, source, :length]
            cache[:, target, length:] = cache[:, source] = GARBAGE


class NumpyStep:
    def __init__(self, slots: NumpySlots, first_row: int, rows: int, seq: int) -> None:
        manifest = slots.backend.manifest
        self._slots, self._rows = slots, range(first_row, first_row + rows)
        self.input_ids = np.zeros((rows, seq), np.int64)
        self.hidden: list[NDArray[np.generic]] = [np.zeros((rows, seq, HIDDEN)) for _ in manifest.segments]
        self.logits = np.zeros((rows, seq, manifest.model.vocab_size))
        self.token = np.zeros((rows, seq), np.int64)
        self.score = np.zeros((rows, seq))
        self._places: list[int] | None = None

    def forget(self) -> None:
        self.input_ids[:], self.token[:], self.score[:], self.logits[:] = 0, -1, 1.0, GARBAGE
        for hidden in self.hidden:
            hidden[:] = FORGOTTEN
        self._places = None

    def place(self, lengths: Sequence[int]) -> None:
        seq, slots = self.input_ids.shape[1], self._slots.backend.manifest.max_seq_len
        assert len(lengths) == len(self._rows) and all(0 <= n <= slots - seq for n in lengths), f"{lengths} + {seq} of {slots}"
        self._places = list(lengths)

    def run(self, graph: str) -> None:
        backend = self._slots.backend
        backend.launches[graph] += 1
        if graph in backend.layers:
            self._segment(graph, backend.layers[graph])
        elif graph == "head":
            self.logits[:] = backend.model.logits(np.asarray(self.hidden[-1], np.float64))
            self.token[:] = self.logits.argmax(-1)
        else:
            self._exit(graph, backend.exits[graph])

    def _segment(self, graph: str, layers: range) -> None:
        assert self._places is not None, f"{graph} was run before place()"
        slots, model = self._slots, self._slots.backend.model
        slots.layers_launched += len(layers)
        reads, writes = hidden_states(slots.backend.manifest, graph)
        seq, rows = self.input_ids.shape[1], slice(self._rows.start, self._rows.stop)
        positions = np.array(self._places)[:, None] + np.arange(seq)
        visible = np.arange(slots.keys.shape[2]) <= positions[:, :, None]
        hidden = model.embed(self.input_ids, positions) if layers.start == 0 else np.array(self.hidden[reads], np.float64)
        for layer in layers:
            keys, values = model.project(layer, hidden)
            for n, row in enumerate(self._rows):
                slots.keys[layer, row, positions[n]], slots.values[layer, row, positions[n]] = keys[n], values[n]
            hidden = model.layer(layer, hidden, slots.keys[layer, rows], slots.values[layer, rows], visible)
        self.hidden[writes][:] = hidden

    def _exit(self, graph: str, info: ExitInfo) -> None:
        backend = self._slots.backend
        reads, writes = hidden_states(backend.manifest, graph)
        state = np.array(self.hidden[reads], np.float64)
        if info.asks_mlp:
            self.score[:] = backend.script(graph, state) if backend.script else backend.model.score(info.checkpoint, state)
        if info.head != "identity":
            self.hidden[writes][:] = backend.model.translated(info.checkpoint, state)
