"""Interface of a backend, which loads a target's graphs and runs them over KV caches.

A ``Backend`` holds the weights and is shared by all callers. An ``ExecutionContext`` holds the KV caches of up to ``capacity``
sequences, a row each, and belongs to one thread. A ``Step`` is one forward pass over some new tokens of each of several
sequences: the caller fills its arrays, places the tokens in the caches, and runs graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.step_arrays import RowPadding
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.lora import LoraAdapter


class Logits(NamedTuple):
    """The model's own ``logits`` [S, V] for S tokens of a sequence, the argmax of each, and, where there is a draft head, the
    ``states`` [S, D] that it reads; of all tokens of the sequence in the step where the head has a cache."""

    logits: NDArray[np.floating]
    tokens: list[int]
    states: NDArray[np.generic] | None = None


class Step(Protocol):
    """Buffers and bindings for T tokens of sequences at consecutive batch indices, packed sequence after sequence.

    Arrays are host views whose memory the next step may reuse. They may be longer than T or N; the rest is undefined.
    """

    input_ids: NDArray[np.int64]  # [T]
    hidden: list[NDArray[np.generic]]  # [T, H] output of each segment but the last; the last array is the input of ``head``
    logits: NDArray[np.float32]  # [N, V] unprocessed logits of the requested tokens, or of all T after ``head``
    token: NDArray[np.int64]  # [N], argmax of the logits, or the guess of ``draft``
    before: NDArray[np.generic]  # [T, D], states that ``draft`` reads
    states: NDArray[np.generic]  # [T or N, D], see `Logits`, where there is a draft head; [N, D] after ``draft``
    score: NDArray[np.float32]  # [T], confidence of an exit's MLP router or of the draft head, 0 … 1

    def place(self, num_cached_tokens: Sequence[int]) -> None:
        """Set the cache slots and positions of the tokens: those of sequence b start at ``num_cached_tokens[b]``.

        Entries of rows without tokens are ignored. A backend may pad all sequences to the longest one's token count and write
        undefined values into the slots after all that a row holds. Raises CacheFullError when the last slot is beyond
        the bundle's max_seq_len.
        """

    def place_pairs(self, slots: Sequence[int]) -> None:
        """`place` for a step of ``draft``, which leaves the states of recurrent layers as they are."""

    def run(self, graph: str) -> None:
        """Run one graph of the bundle on the buffers: ``segment_i``, ``exit_c``, ``head`` or ``draft``."""

    def run_all(self, graphs: Sequence[str]) -> None:
        """`run` for ``graphs``, one after the other; a device may launch them as one CUDA graph."""


class LoopStep(Step, Protocol):
    """A pass of `LOOP` over tokens of rows of a looped model's loops: row r · R + n is the n-th of R loops of sequence r. ``run``
    takes `LOOP` only."""

    before_loop: NDArray[np.generic]  # [T, H], the states that the loop begins with; of the first loop any
    after_loop: NDArray[np.generic]  # [T, H], those that the next loop begins with
    first_loop: NDArray[np.bool_]  # [T, 1], whether a token runs the first loop, which begins with the embedding of its id


class BlockMemory(Protocol):
    """Memory in blocks whose bytes can be written to files; see `HostBlocks`.

    Args:
        layout: what the bytes of a piece are.
        piece_bytes: how many these are.
        versions: by id, a number that changes before the piece does.
    """

    layout: str
    piece_bytes: int
    versions: list[int]

    def content(self, piece: int) -> NDArray[np.uint8]:
        """The bytes of a piece, to read."""


class PrefixRows(Protocol):
    """What rows have kept of earlier texts, in blocks of BLOCK_TOKENS tokens. Copies in the memory of a device raise
    DeviceMemoryError where it has none left."""

    def save(self, row: int, first: int, ids: Sequence[int]) -> None:
        """Copy the blocks ``first``, ``first`` + 1, … of ``row`` (tokens from ``first`` × BLOCK_TOKENS on) into ``ids``."""

    def load(self, ids: Sequence[int], row: int) -> None:
        """Copy the blocks ``ids`` into ``row``, as its first tokens."""

    def release(self, ids: Sequence[int]) -> None:
        """Give the memory of the blocks ``ids`` back, where others can have it."""


class PrefixMemory(PrefixRows, BlockMemory, Protocol):
    """Blocks that can be written to files, and read from them."""

    def write_row(self, row: int, block: int, content: NDArray[np.uint8]) -> None:
        """Copy the bytes of a piece into the ``block``-th block of ``row``. Threads may write different blocks at once."""

    def clear(self, block: int, tokens: int) -> None:
        """Zero what ``block`` holds after its first ``tokens``."""

    def reach(self, row: int, blocks: int) -> None:
        """Say that ``row`` is filled up to so many blocks."""


class SnapshotMemory(BlockMemory, Protocol):
    """Copies of what recurrent layers keep of a row, one a slot."""

    def save(self, row: int, slot: int) -> None:
        """Copy the states of ``row`` into ``slot``."""

    def load(self, slot: int, row: int) -> None:
        """Copy ``slot`` into ``row``, which then holds the text that was saved."""

    def write_row(self, row: int, content: NDArray[np.uint8]) -> None:
        """Copy the bytes of a piece into ``row``."""

    def release(self, slots: Sequence[int]) -> None:
        """Give the memory of ``slots`` back."""


class RowStates(Protocol):
    """What a backend keeps of the tokens that ran, a row for each sequence: keys and values, and states of recurrent layers.

    `Step.place` after fewer tokens than a row holds cuts the keys and values there: the slots after them are written again. A
    state sums up all tokens; it begins with zeros where a step places the first token of a text, and only `cut_rows` cuts it.
    """

    @property
    def prefix_blocks(self) -> PrefixRows | None:
        """The memory of the prefix cache, if there is one."""

    @property
    def snapshots(self) -> SnapshotMemory | None:
        """The memory of the prefix cache for states, where there is a prefix cache and the model is recurrent."""

    def cut_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget what ``rows`` hold after their first ``lengths`` tokens, of which the latest steps with drafts ran the last.

        A step has drafts where a sequence wants the logits of several tokens. Those of all rows are settled afterwards.
        """

    def forget_row(self, row: int, tainted: bool = False) -> None:
        """Forget the sequence in ``row``. ``tainted``: it may hold NaN, which must not reach the next one."""

    def release_row(self, row: int) -> None:
        """Give the memory of a forgotten row back, where it grows with the text."""

    def move_row(self, source: int, target: int, num_cached_tokens: int) -> None:
        """Copy what batch index ``source`` has of its cached tokens to batch index ``target``, in every layer."""

    def close(self) -> None:
        """Drop all references to the rows, so that their memory is freed with this object. It cannot be used afterwards."""


class ExecutionContext(RowStates, Protocol):
    """Steps over the rows of up to ``capacity`` sequences.

    Slots after a sequence's valid entries are ignored but must be finite, because a backend may multiply them by 0.

    Args:
        packs_steps: a step takes any numbers of tokens of any rows at little more than their own cost. Otherwise prompts are run
            alone, and running sequences must have the first rows.
        has_draft_head: ``draft`` can be run, and passes through all layers give ``states``.
        has_draft_cache: ``draft`` reads the pairs before, so that ``states`` are those of all tokens of a step.
        adapters: [capacity], the number of each row's LoRA adapter in the steps that come next; 0: none.
        position_offsets: [capacity], by how much the positions of a row's tokens exceed their slots in the steps that are placed
            next, see `Manifest.long_rotary_from`.
    """

    capacity: int
    adapters: list[int]
    position_offsets: list[int]
    layers_launched: int  # decoder layers launched in this context so far
    every_layer: Sequence[str]  # graphs that together run all layers: every segment, or the uncut graph
    packs_steps: bool
    has_draft_head: bool
    has_draft_cache: bool

    def step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int] = ()) -> Step:
        """A step of ``counts[b]`` tokens for each batch index from ``first_index`` on; 0 skips a sequence between others.

        Args:
            num_logits: number of last tokens of each sequence to compute logits for in the last segment; none when omitted.
        """

    def fits_together(self, first_index: int, counts: Sequence[int], num_cached_tokens: Sequence[int]) -> bool:
        """Whether a step of ``counts`` tokens after ``num_cached_tokens`` fits into the rows, padding included."""


class LoopContext(ExecutionContext, Protocol):
    """A context of a looped model in which a sequence's caches of all its loops lie side by side."""

    loops: int  # R; a sequence at batch index b has the rows b · R … b · R + R - 1

    def loop_step(self, first_index: int, counts: Sequence[int], num_logits: Sequence[int]) -> LoopStep:
        """A step of ``counts[i]`` tokens of each row from ``first_index`` on, with logits of the last ``num_logits[i]``."""

    def loops_fit(self, counts: Sequence[int], slots: Sequence[int]) -> bool:
        """Whether a `loop_step` of ``counts`` tokens in cache slots from ``slots`` on fits into the rows, padding included."""


class Backend(Protocol):
    """A loaded target. Those of GPUs have a ``device``, see `wait_for`."""

    name: str
    launches: dict[str, int]  # graph name → number of launches; the only launch counter

    @property
    def packs_steps(self) -> bool:
        """See `ExecutionContext`."""

    @property
    def has_prefix_blocks(self) -> bool:
        """Whether its contexts can copy keys and values into a prefix cache and back."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all layers."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence, over all recurrent layers."""

    @property
    def bits_key(self) -> Sequence[str]:
        """What decides the bits of keys, values and states, but for the tokens and the policy: the model's files, the kernels of
        this machine and how launches are padded. Empty where prefixes are not written to files, as on devices."""

    @property
    def row_padding(self) -> RowPadding | None:
        """How launches are padded so that no token's bits depend on what shares its launch; None: no padding that was tried
        achieves that on this machine, and launches are not padded. Measured when first read; targets of
        GPUs try no padding, and have `NO_PADDING` or None."""

    @property
    def private_weights(self) -> str:
        """Why this process holds a copy of the weights in private memory; empty where it maps them, or needs no copy."""

    @property
    def pass_costs(self) -> CostTable | None:
        """See `measure_pass_costs`; None where passes are not measured. Measured when first read, unless this machine has."""

    @property
    def loop_costs(self) -> CostTable | None:
        """See `measure_loop_costs`; None where the target has no `LOOP`. Measured as `pass_costs` are."""

    def with_bits(self, bits: str) -> Backend:
        """The same sessions as `EngineOptions.bits` says; ``fast``: launches are not padded and `row_padding` is None. Targets of
        GPUs, which do not pad, are the same with both."""

    def with_adapters(self, adapters: Sequence[LoraAdapter]) -> Backend:
        """The same sessions for steps with LoRA ``adapters``. Raises AdapterError where the model or the target takes none of
        them: of the targets only ``cpu`` does."""

    def without_draft_head(self) -> Backend:
        """The same sessions for policies that do not run the draft head: rows have no cache for it. Targets of GPUs keep it."""

    def context(self, capacity: int, prefix_blocks: int = 0) -> ExecutionContext:
        """A new execution context: KV caches for ``capacity`` sequences, memory for ``prefix_blocks`` of a prefix cache."""


@contextmanager
def uncounted(launches: dict[str, int]) -> Iterator[None]:
    """``launches`` of a backend inside the context serve no request and do not count."""
    counted = dict(launches)
    try:
        yield
    finally:
        launches.clear()
        launches.update(counted)


def wait_for(backend: Backend) -> None:
    """Block until the graphs that steps have run are done: on a GPU `Step.run` only queues them."""
    device = getattr(backend, "device", None)
    if device is not None:
        device.synchronize()
