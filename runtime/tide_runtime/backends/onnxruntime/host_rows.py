"""KV caches and states of target cpu in host memory, a row for each sequence, and the sessions that steps over them run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import onnxruntime as ort

from tide_runtime.backends.kv_caches import KVCaches, kv_bytes_per_token
from tide_runtime.backends.onnxruntime.sessions import Sessions
from tide_runtime.backends.prefix_blocks import PrefixBlocks
from tide_runtime.backends.recurrent_states import RecurrentStates, StateMemory, StateSnapshots, state_bytes
from tide_runtime.backends.step_arrays import RowEnds, RowPadding, StepBuffers
from tide_runtime.bundle.manifest import ADVANCE, DRAFT


class HostSessions(Sessions):
    """The sessions of target cpu, those of its ``adapted`` forms among them, and what a row over them takes."""

    adapted: Mapping[str, ort.InferenceSession] = {}  # forms of the graph of all layers, see `adapted_form`

    def session(self, name: str) -> ort.InferenceSession:
        return self.adapted.get(name) or super().session(name)

    @property
    def kv_bytes_per_token(self) -> int:
        caches = self.manifest.caches if DRAFT in self.layers else self.manifest.kv
        return kv_bytes_per_token(caches, np.dtype(self.cache_dtype).itemsize)

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.manifest)

    @cached_property
    def operands(self) -> dict[str, list[int]]:
        """What steps with drafts keep of each token: name → shape."""
        outputs = (value for graph in self.every_layer for value in self.session(graph).get_outputs())
        return {value.name: value.shape[2:] for value in outputs if value.name.startswith("undo_")}


class HostRows:
    """What the rows of a context hold: caches that graphs update in place, states, each row's adapter and position offset."""

    def __init__(self, backend: HostSessions, capacity: int, prefix_blocks: int, padding: RowPadding, loops: int) -> None:
        self.backend = backend
        self.capacity = capacity
        self.loops = loops
        self.layers_launched = 0
        self.padding = padding
        self.position_offsets = [0] * capacity
        self.adapters = [0] * capacity
        self.every_layer: Sequence[str] = backend.every_layer
        manifest = backend.manifest
        self.has_draft_head = DRAFT in backend.layers
        self.has_draft_cache = self.has_draft_head and manifest.draft_head is not None and manifest.draft_head.kv is not None
        self.caches = KVCaches(manifest, backend.cache_dtype, capacity, padding.sequence.max_added, loops, self.has_draft_head)
        self.ends = RowEnds(capacity, self.caches.limit, padding.sequence)
        self.prefix_blocks = PrefixBlocks(self.caches, prefix_blocks, self.ends) if prefix_blocks else None
        self.recurrent = RecurrentStates(manifest, capacity, backend.operands) if manifest.is_recurrent else None
        self.snapshots: StateSnapshots | None = None
        if self.recurrent is not None and prefix_blocks:
            memory = StateMemory.of(backend.kv_bytes_per_token, backend.state_bytes)
            self.snapshots = StateSnapshots(self.recurrent, prefix_blocks // memory.snapshot_blocks)
        self.buffers = StepBuffers(manifest, backend.dtype, backend.logits_dtype)
        self._bound_caches: dict[tuple[int, int], dict[str, ort.OrtValue]] = {}

    def count(self, graph: str) -> None:
        """Count one launch of ``graph``. Launches are counted here only."""
        self.backend.launches[graph] += 1
        self.layers_launched += self.backend.layers[graph]

    def bound_caches(self, first_index: int, batch_size: int) -> dict[str, ort.OrtValue]:
        """Name → OrtValue of the caches of consecutive rows."""
        key = (first_index, batch_size)
        if key not in self._bound_caches:
            part = slice(first_index, first_index + batch_size)
            arrays = self.caches.arrays.items()
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
        self._bound_caches.clear()
        for part in (self.prefix_blocks, self.snapshots, self.recurrent, self.caches):
            if part is not None:
                part.close()
