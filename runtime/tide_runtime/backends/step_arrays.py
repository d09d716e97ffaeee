"""The arrays of a step: how many tokens of which rows, where each goes, and memory for what graphs take and give.

Tokens are packed: [T], those of each row behind those of the row before. Kernels that want rows of one length S get index
arrays between the two forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.bundle.manifest import Manifest


class StepShape(NamedTuple):
    """``seq``: S, the longest row's tokens; ``even``: whether all rows have as many; ``tokens``: T; ``outputs``: N, tokens that
    want logits, at least 1. T and N are rounded up where rows are uneven."""

    first_row: int
    rows: int
    seq: int
    even: bool
    tokens: int
    outputs: int

    @classmethod
    def of(cls, first_row: int, counts: Sequence[int], wanted: Sequence[int]) -> StepShape:
        rows, seq, tokens, outputs = len(counts), max(counts), sum(counts), sum(wanted) or 1
        even = tokens == rows * seq
        if not even:
            tokens, outputs = rounded_tokens(tokens, rows * seq), rounded_tokens(outputs, rows * seq)
        return cls(first_row, rows, seq, even, tokens, outputs)


class StepBuffers:
    """Memory that the steps of all shapes share."""

    def __init__(self, manifest: Manifest, dtype: type[np.generic], logits_dtype: type[np.generic]) -> None:
        self._model, self._boundaries, self._dtype = manifest.model, len(manifest.segments), dtype
        self._logits_dtype = logits_dtype
        self._tokens = 0

    def views(
        self, shape: StepShape
    ) -> tuple[NDArray[np.int64], list[NDArray[np.generic]], NDArray[Any], NDArray[np.int64], NDArray[np.float32]]:
        """input_ids, hidden, logits, token and score of `Step`."""
        tokens, outputs = shape.tokens, max(shape.tokens, shape.outputs)
        if outputs > self._tokens:  # bindings to the old arrays keep them alive
            self._allocate(max(outputs, 2 * self._tokens))
        hidden = [states[:tokens] for states in self._hidden]
        return self._input_ids[:tokens], hidden, self._logits[:outputs], self._token[:outputs], self._score[:tokens]

    def _allocate(self, tokens: int) -> None:
        """Untouched pages cost nothing: a long prompt asks for one token's logits."""
        self._tokens = tokens
        self._input_ids = np.zeros(tokens, np.int64)
        self._hidden = [np.zeros((tokens, self._model.hidden_size), self._dtype) for _ in range(self._boundaries)]
        self._logits = np.zeros((tokens, self._model.vocab_size), self._logits_dtype)
        self._token = np.zeros(tokens, np.int64)
        self._score = np.zeros(tokens, np.float32)


class StepPositions:
    """Where a step's tokens go, in the forms that kernels ask for: ``arrays``, the graphs' inputs by name."""

    def __init__(self, shape: StepShape) -> None:
        rows, seq, tokens = shape.rows, shape.seq, shape.tokens
        self._one_each = shape.even and seq == 1  # as when decoding
        self._one = rows == tokens == 1  # goes to the only place there is
        self._write_index = np.zeros(rows, np.int64)
        self._position_ids = np.zeros(tokens, np.int64)
        self._padded_position_ids = self._position_ids[:, None] if self._one_each else np.zeros((rows, seq), np.int64)
        self._seqlens_k = np.zeros(rows, np.int32)
        self._total = np.zeros((), np.int32)
        self._padded_from = np.zeros((rows, seq), np.int64)
        self._packed_from = np.zeros(tokens, np.int64)
        self._logits_index = np.zeros(shape.outputs, np.int64)
        self._seq, self._steps = seq, np.arange(seq)
        self._arranged: tuple[list[int], list[int]] | None = None
        self.arrays: dict[str, NDArray[Any]] = {
            "write_index": self._write_index,
            "position_ids": self._position_ids,
            "padded_position_ids": self._padded_position_ids,
            "seqlens_k": self._seqlens_k,
            "total_sequence_length": self._total,
            "padded_from": self._padded_from,
            "packed_from": self._packed_from[None],
            "logits_index": self._logits_index,
        }

    def arrange(self, counts: Sequence[int], wanted: Sequence[int]) -> None:
        """``counts[b]`` tokens of each row, logits for the last ``wanted[b]``. What is left over points to places that exist."""
        if self._one:
            return
        arranged = [*counts], [*wanted]
        if self._arranged == arranged:
            return
        self._arranged = arranged
        # Lists, as uneven steps have few tokens, and arithmetic on arrays takes a microsecond or more each time.
        packed, padded, chosen, begin = list[int](), list[int](), list[int](), 0
        for row, count in enumerate(counts):
            place, end = row * self._seq, begin + count
            packed += range(place, place + count)
            padded += range(begin, end)
            # A row without tokens takes another's: garbage, written behind what it has.
            padded += [max(0, end - 1)] * (self._seq - count)
            chosen += range(end - wanted[row], end) if wanted else ()
            begin = end
        self._packed_from[:begin], self._packed_from[begin:] = packed, 0
        self._padded_from.reshape(-1)[:] = padded
        self._logits_index[: len(chosen)], self._logits_index[len(chosen) :] = chosen, 0

    def place(self, lengths: Sequence[int]) -> None:
        """Row b's tokens go to the cache slots and positions from ``lengths[b]`` on."""
        seq = self._seq
        self._total[()] = max(lengths) + seq
        if self._one:
            self._write_index[0] = self._seqlens_k[0] = self._position_ids[0] = lengths[0]
            return
        self._write_index[:] = lengths
        if self._one_each:  # arithmetic on arrays takes several times as long
            self._seqlens_k[:] = self._position_ids[:] = lengths
            return
        self._seqlens_k[:] = [length + seq - 1 for length in lengths]
        np.add(self._write_index[:, None], self._steps, out=self._padded_position_ids)
        np.take(self._padded_position_ids.ravel(), self._packed_from, out=self._position_ids, mode="clip")

    def place_scattered(self, slot: int, positions: NDArray[np.int64]) -> None:
        """One row's tokens go to the cache slots from ``slot`` on; they stand at ``positions`` of the text."""
        self._write_index[0] = slot
        self._position_ids[:] = self._padded_position_ids[0] = positions


def rounded_tokens(count: int, most: int) -> int:
    """``count`` tokens of uneven rows, rounded up so that they need few shapes, whose bindings are kept; ``most``: as many as if
    all rows were the longest.

    Rounded to what costs least on the CPU: ONNX Runtime's matrix products take six tokens at a time (with AVX2; twice as many
    with AVX-512), and one to four of a last six in about the same time. Other backends do not mind.
    """
    if count <= 4:
        return count
    sixes, rest = divmod(count - 1, 6)
    return min(most, 6 * sixes + (4 if rest < 4 else 6))
