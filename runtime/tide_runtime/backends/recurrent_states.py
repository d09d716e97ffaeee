"""States of recurrent layers in host memory: what convolutions and recurrences keep of a text, of a fixed size.

A state sums up all tokens, so it cannot be cut where drafts are rejected. Each row therefore has two buffers for every state. A
step with drafts reads one and writes the other, and keeps the operands of its recurrences (the layers' inputs at each token); the
graph `ADVANCE` then moves the old state over the accepted tokens alone. That costs no matrix product, and no token another bit,
because the kernels go token by token.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.graph_contract import read_name
from tide_runtime.backends.host_blocks import HostBlocks
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.backends.lazy_memory import LazyMemory
from tide_runtime.bundle.manifest import Manifest

_BUFFERS = 2  # buffers for each state of a row
_KEPT_ADVANCES = 64  # bindings, which take a fifth of an undo's time: a single caller's drafts need no more


class StateMemory(NamedTuple):
    """What keys, values and states take of the memory budget, which is counted in blocks.

    Args:
        block_bytes: of the keys and values of BLOCK_TOKENS tokens; a page where no layer has any.
        row_blocks: of the states of a running sequence.
        snapshot_blocks: of one kept copy of a sequence's states.
    """

    block_bytes: int
    row_blocks: int = 0
    snapshot_blocks: int = 0

    @classmethod
    def of(cls, kv_bytes_per_token: int, state_bytes: int) -> StateMemory:
        block = BLOCK_TOKENS * kv_bytes_per_token or mmap.PAGESIZE
        return cls(block, -(-_BUFFERS * state_bytes // block), -(-state_bytes // block))


class StepStates(NamedTuple):
    """What a step reads and writes: the buffers ``source`` and ``target``, and the operands of each token in set ``number``,
    which has ``room`` for so many; 0: they are not kept."""

    source: int
    target: int
    number: int = 0
    room: int = 0


class DraftRows(NamedTuple):
    """The tokens that a row had in its latest step with drafts: packed rows from ``begin`` on, after ``cached`` tokens of the
    text, with operands name → [1, T, …] of set ``number``. ``alone``: no other row was in the launch."""

    begin: int
    tokens: int
    cached: int
    operands: dict[str, NDArray[np.float32]]
    number: int
    alone: bool


class RecurrentStates:
    """States of ``rows`` sequences.

    Args:
        operands: what a step with drafts keeps of each token: name → shape.

    Attributes:
        arrays: ``state_{layer}_{n}`` → [2, rows, *shape] fp32. The arrays are never replaced.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, manifest: Manifest, rows: int, operands: Mapping[str, Sequence[int]]) -> None:
        shapes = {f"state_{layer}_{n}": state.shape for (layer, n), state in manifest.states.items()}
        self._memory = {name: LazyMemory(_BUFFERS * rows * _bytes(shape)) for name, shape in shapes.items()}
        self.arrays: dict[str, NDArray[np.float32]] = {
            name: self._memory[name].bytes.view(np.float32).reshape(_BUFFERS, rows, *shape) for name, shape in shapes.items()
        }
        self._current = [0] * rows  # the buffer that holds each row's state
        self._drafts: dict[int, DraftRows] = {}
        self._operands = OperandSets(operands)
        self._advances: dict[tuple[int, ...], ort.IOBinding] = {}
        self._bound: dict[tuple[int, int, int], dict[str, ort.OrtValue]] = {}

    def begin(
        self, first: int, counts: Sequence[int], num_cached_tokens: Sequence[int], num_logits: Sequence[int], tokens: int
    ) -> StepStates:
        """The buffers of a step of ``counts`` tokens of the rows from ``first`` on, padded to ``tokens`` in all.

        A step with drafts, where a sequence wants the logits of several tokens, can be cut (`cut_rows`); others work in place.
        Rows that begin a text begin with zeros. A launch reads one buffer of all its rows, those without tokens included, so the
        rows that are in the other one are copied.
        """
        current = self._current
        end = first + len(counts)
        begun = {first + i for i, count in enumerate(counts) if count and not num_cached_tokens[i]}
        source = current[first]
        if begun or current[first:end].count(source) < len(counts):
            going = [current[row] for row in range(first, end) if row not in begun]
            source = Counter(going).most_common(1)[0][0] if going else source
            for array in self.arrays.values():
                for row in range(first, end):
                    if row in begun:
                        array[source, row] = 0
                    elif current[row] != source:
                        array[source, row] = array[current[row], row]
        for row, count in enumerate(counts, first):
            if count:
                self._drafts.pop(row, None)
        if max(num_logits, default=0) < 2:
            current[first:end] = [source] * len(counts)
            return StepStates(source, source)
        current[first:end] = [1 - source] * len(counts)
        number = self._operands.free({drafts.number for drafts in self._drafts.values()})
        operands = self._operands.views(number, tokens)
        begin = 0
        for row, count, cached in zip(range(first, end), counts, num_cached_tokens, strict=True):
            if count:
                self._drafts[row] = DraftRows(begin, count, cached, operands, number, len(counts) == 1)
            begin += count
        return StepStates(source, 1 - source, number, self._operands.room(number))

    def operands(self, step: StepStates, tokens: int) -> dict[str, NDArray[np.float32]]:
        """Name → [1, tokens, …] of what a step keeps of its tokens; none where it keeps nothing."""
        return self._operands.views(step.number, tokens) if step.room else {}

    def cut_rows(self, rows: Sequence[int], lengths: Sequence[int], advance: Callable[[], ort.InferenceSession]) -> None:
        """See `RowStates`. ``advance``: the session of graph `ADVANCE`, run once for each row that was cut: its kernels take the
        same time for several rows at once, and the rows that were not cut need not wait for theirs."""
        for row, length in zip(rows, lengths, strict=True):
            drafts = self._drafts.get(row)
            if drafts is not None and length < drafts.cached + drafts.tokens:
                self._advance(row, drafts, length - drafts.cached, advance())
        self._drafts.clear()

    def _advance(self, row: int, drafts: DraftRows, accepted: int, session: ort.InferenceSession) -> None:
        """Take the old state over the first ``accepted`` of the row's tokens.

        Of a row that ran alone in its own buffer, which then is the current one: that saves a third of the memory traffic. Of
        others in the buffer that the launch wrote, so that its rows stay in one.
        """
        old = 1 - self._current[row]
        if drafts.alone:
            self._current[row] = old
        key = (row, old, self._current[row], accepted, drafts.begin, drafts.number, self._operands.room(drafts.number))
        if key not in self._advances:
            if len(self._advances) == _KEPT_ADVANCES:
                self._advances.clear()
            self._advances[key] = self._bind_advance(row, old, drafts, accepted, session)
        session.run_with_iobinding(self._advances[key])

    def _bind_advance(self, row: int, old: int, drafts: DraftRows, accepted: int, session: ort.InferenceSession) -> ort.IOBinding:
        part = slice(drafts.begin, drafts.begin + accepted)
        operands = {name: ort.OrtValue.ortvalue_from_numpy(array[:, part]) for name, array in drafts.operands.items()}
        given = self.bound(old, row, 1) | operands
        written = self.bound(self._current[row], row, 1)
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_ortvalue_input(value.name, given[value.name])
        for value in session.get_outputs():
            binding.bind_ortvalue_output(value.name, written[read_name(value.name)])
        return binding

    def bound(self, half: int, first: int, rows: int) -> dict[str, ort.OrtValue]:
        """Name → OrtValue [rows, *shape] of consecutive rows in buffer ``half``."""
        key = (half, first, rows)
        if key not in self._bound:
            arrays = self.arrays.items()
            self._bound[key] = {n: ort.OrtValue.ortvalue_from_numpy(array[half, first : first + rows]) for n, array in arrays}
        return self._bound[key]

    def forget_row(self, row: int) -> None:
        """What the row holds is not needed any more; the next text begins with zeros."""
        self._drafts.pop(row, None)

    def release_row(self, row: int) -> None:
        """Give the physical memory of a forgotten row back to the operating system."""
        for name, array in self.arrays.items():
            size = array[0, row].nbytes
            for buffer in range(_BUFFERS):
                begin = (buffer * array.shape[1] + row) * size
                self._memory[name].give_back(begin, begin + size)

    def move_row(self, source: int, target: int) -> None:
        """Copy the state of row ``source`` to row ``target``."""
        half = self._current[target] = self._current[source]
        for array in self.arrays.values():
            array[half, target] = array[half, source]

    def row(self, row: int) -> list[NDArray[np.float32]]:
        """The states of a row, to read or to write."""
        return [array[self._current[row], row] for array in self.arrays.values()]

    def close(self) -> None:
        """Give all physical memory back."""
        self._advances.clear()
        self._bound.clear()
        self._drafts.clear()
        self.arrays.clear()
        for memory in self._memory.values():
            memory.give_back(0, memory.bytes.size)
        self._memory.clear()


class OperandSets:
    """Buffers for the operands of steps with drafts: a set for each step whose drafts are not judged yet, mostly one.

    Args:
        shapes: name → shape of one token's operand.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes = shapes
        self._sets = list[dict[str, NDArray[np.float32]]]()

    def free(self, taken: set[int]) -> int:
        """The number of a set that is not among those ``taken``."""
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        if number == len(self._sets):
            self._sets.append({name: np.zeros((0, *shape), np.float32) for name, shape in self._shapes.items()})
        return number

    def room(self, number: int) -> int:
        """How many tokens a set has room for."""
        return min(len(array) for array in self._sets[number].values())

    def views(self, number: int, tokens: int) -> dict[str, NDArray[np.float32]]:
        """Name → [1, tokens, …] of a set, which grows as need be. Bindings to its former arrays keep those alive."""
        arrays = self._sets[number]
        if (room := self.room(number)) < tokens:
            arrays.update({name: np.zeros((max(tokens, 2 * room), *shape), np.float32) for name, shape in self._shapes.items()})
        return {name: array[None, :tokens] for name, array in arrays.items()}


class StateSnapshots(HostBlocks):
    """``count`` copies of a row's states, in slots from 0 on.

    Attributes:
        layout: what the bytes of a copy are.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, states: RecurrentStates, count: int) -> None:
        super().__init__(count, sum(array[0, 0].nbytes for array in states.arrays.values()))
        self._states = states
        shapes = (f"{name} {array.dtype.str} {list(array.shape[2:])}" for name, array in states.arrays.items())
        self.layout = ", ".join(("snapshots", *shapes))

    def save(self, row: int, slot: int) -> None:
        """Copy the states of ``row`` into ``slot``."""
        self.change([slot])
        for kept, state in zip(self._views(self.content(slot)), self._states.row(row), strict=True):
            kept[...] = state

    def load(self, slot: int, row: int) -> None:
        """Copy ``slot`` into ``row``."""
        self.write_row(row, self.content(slot))

    def write_row(self, row: int, content: NDArray[np.uint8]) -> None:
        """Copy the bytes of a snapshot into ``row``."""
        for kept, state in zip(self._views(content), self._states.row(row), strict=True):
            state[...] = kept

    def _views(self, content: NDArray[np.uint8]) -> Iterable[NDArray[np.float32]]:
        offset = 0
        for array in self._states.arrays.values():
            size = array[0, 0].nbytes
            yield content[offset : offset + size].view(np.float32).reshape(array.shape[2:])
            offset += size


def state_bytes(manifest: Manifest) -> int:
    """Bytes of the states of one sequence, over all layers."""
    return sum(_bytes(state.shape) for state in manifest.states.values())


def _bytes(shape: Sequence[int]) -> int:
    return int(np.prod(shape)) * np.dtype(np.float32).itemsize
