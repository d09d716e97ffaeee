"""Arrays of a step: its shape, the cache slots and positions of its tokens, masks, and memory for the graphs' inputs and outputs.

Tokens are packed, [T], sequence after sequence. Kernels that need padded batches [B, S] get index arrays that map between the
two layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.bundle.manifest import Manifest


class Rounding(NamedTuple):
    """Rounds a number of rows up: ``spare`` more of them, at least ``least``, and a multiple of ``multiple``."""

    least: int = 1
    multiple: int = 1
    spare: int = 0

    def up(self, rows: int) -> int:
        return max(self.least, -(-(rows + self.spare) // self.multiple) * self.multiple)

    @property
    def max_added(self) -> int:
        return max(self.least - 1, self.multiple - 1 + self.spare)


class RowPadding(NamedTuple):
    """Sizes with which a token has the same bits whatever shares its launch: kernels sum in another order for one row, for a row
    that is alone in its tile, or where the number of slots that attention reads is no multiple of four.

    Args:
        launch: rounds the tokens of a launch, which are the rows of its matrix products.
        sequence: rounds the tokens of each sequence, which are the rows of its attention; attention reads a slot for each of
            them. Only graphs with padded attention take more rows than tokens.
    """

    launch: Rounding = Rounding()
    sequence: Rounding = Rounding()


NO_PADDING = RowPadding()
PADDED_TOKENS = (1, 2, 4, 8, 16)  # tokens per sequence in the padded steps of devices
MAX_PADDED_TOKENS = 128  # tokens of a padded step in all; computing more takes longer than the host takes to launch the kernels


class StepShape(NamedTuple):
    """Shape of a step, which its buffers and bindings depend on.

    Args:
        first_index: batch index of the first sequence.
        seq: S, the most tokens of a sequence, padded.
        even: whether all sequences have as many tokens.
        tokens: T, rounded up in uneven steps, and padded.
        outputs: N, tokens to compute logits for, at least 1; rounded up in uneven steps, and padded.
    """

    first_index: int
    batch_size: int
    seq: int
    even: bool
    tokens: int
    outputs: int

    @classmethod
    def padded(cls, batch_size: int, seq: int) -> StepShape:
        """The shape of all steps of up to ``seq`` tokens of each of the first ``batch_size`` rows, with logits of up to all."""
        return cls(0, batch_size, seq, False, batch_size * seq, batch_size * seq)

    @classmethod
    def of(
        cls,
        first_index: int,
        counts: Sequence[int],
        num_logits: Sequence[int],
        padding: RowPadding = NO_PADDING,
    ) -> StepShape:
        """The shape of a step of ``counts`` tokens per sequence and logits of ``num_logits``."""
        batch_size = len(counts)
        longest = max(counts)
        tokens = sum(counts)
        outputs = sum(num_logits) or 1
        even = tokens == batch_size * longest
        if not even:
            tokens, outputs = (rounded_tokens(count, batch_size * longest) for count in (tokens, outputs))
        return cls(
            first_index, batch_size, padding.sequence.up(longest), even, padding.launch.up(tokens), padding.launch.up(outputs)
        )


class StepBuffers:
    """Host buffers shared by the steps of all shapes."""

    def __init__(self, manifest: Manifest, dtype: type[np.generic], logits_dtype: type[np.generic]) -> None:
        self._manifest = manifest
        self._boundaries = len(manifest.segments)
        self._dtype = dtype
        self._logits_dtype = logits_dtype
        self._width = manifest.draft_head.width if manifest.draft_head is not None else 0
        self._tokens = 0

    def views(
        self, shape: StepShape
    ) -> tuple[
        NDArray[np.int64],
        list[NDArray[np.generic]],
        NDArray[Any],
        NDArray[np.int64],
        NDArray[np.float32],
        NDArray[np.generic],
        NDArray[np.generic],
    ]:
        """input_ids, hidden, logits, token, score, before and states of `Step`."""
        tokens = shape.tokens
        outputs = max(shape.tokens, shape.outputs)
        if outputs > self._tokens:  # bindings to the old arrays keep them alive
            self._allocate(max(outputs, 2 * self._tokens))
        hidden = [states[:tokens] for states in self._hidden]
        logits = self._logits[:outputs]
        token = self._token[:outputs]
        score = self._score[:tokens]
        return self._input_ids[:tokens], hidden, logits, token, score, self._before[:outputs], self._states[:outputs]

    def _allocate(self, tokens: int) -> None:
        """Allocate for ``tokens``, also the logits: pages that are never written take no memory."""
        self._tokens = tokens
        self._input_ids = np.zeros(tokens, np.int64)
        self._hidden = [np.zeros((tokens, self._manifest.hidden_width), self._dtype) for _ in range(self._boundaries)]
        self._logits = np.zeros((tokens, self._manifest.logits_size), self._logits_dtype)
        self._token = np.zeros(tokens, np.int64)
        self._score = np.zeros(tokens, np.float32)
        self._before, self._states = (np.zeros((tokens, self._width), self._dtype) for _ in range(2))


class StepPositions:
    """Cache slots and positions of a step's tokens, in every layout that kernels need; ``arrays``: graph inputs by name.

    ``sequence``: how each sequence's tokens are padded, as in ``shape``.
    """

    def __init__(self, shape: StepShape, sequence: Rounding = NO_PADDING.sequence) -> None:
        self._sequence = sequence
        batch_size = shape.batch_size
        seq = shape.seq
        tokens = shape.tokens
        self._is_decode = shape.even and seq == 1  # one token per sequence
        self._is_single_token = batch_size == tokens == 1
        self._write_index = np.zeros(batch_size, np.int64)
        self._position_ids = np.zeros(tokens, np.int64)
        self._padded_position_ids = self._position_ids[:, None] if self._is_decode else np.zeros((batch_size, seq), np.int64)
        self._seqlens_k = np.zeros(batch_size, np.int32)
        self._query_seqlens = np.full(batch_size, seq, np.int32)
        self._total = np.zeros((), np.int32)
        self._padded_from = np.zeros((batch_size, seq), np.int64)
        self._packed_from = np.zeros(tokens, np.int64)
        self._padded_rows = np.zeros((batch_size, seq, 2), np.int64)
        self._packed_rows = np.zeros((tokens, 2), np.int64)
        self._logits_index = np.zeros(shape.outputs, np.int64)
        self._row_mask = np.zeros((batch_size, seq - sequence.spare), np.float32)  # attention alone needs the spare rows
        self._row_mask[:, 0] = 1
        self._seq = seq
        self._offsets = np.arange(seq)
        self._arranged_for: tuple[list[int], list[int]] | None = None
        self.arrays: dict[str, NDArray[Any]] = {
            "write_index": self._write_index,
            "position_ids": self._position_ids,
            "padded_position_ids": self._padded_position_ids,
            "seqlens_k": self._seqlens_k,
            "total_sequence_length": self._total,
            "query_seqlens": self._query_seqlens,
            "padded_from": self._padded_from,
            "packed_from": self._packed_from[None],
            "padded_rows": self._padded_rows,
            "packed_rows": self._packed_rows[None],
            "logits_index": self._logits_index,
            "row_mask": self._row_mask,
        }

    def arrange(self, counts: Sequence[int], num_logits: Sequence[int]) -> None:
        """Fill the index arrays for ``counts[b]`` tokens per sequence and logits of the last ``num_logits[b]``.

        Unused entries get valid indices.
        """
        if self._is_single_token:
            return
        arranged = [*counts], [*num_logits]
        if self._arranged_for == arranged:
            return
        self._arranged_for = arranged
        self._query_seqlens[:] = [self._sequence.up(count) if count else 0 for count in counts]
        np.less(np.arange(self._row_mask.shape[1]), np.asarray(counts)[:, None], out=self._row_mask, casting="unsafe")
        # Python lists: uneven steps have few tokens, and each NumPy operation takes at least a microsecond.
        packed = list[int]()
        padded = list[int]()
        chosen = list[int]()
        begin = 0
        for index, count in enumerate(counts):
            first, end = index * self._seq, begin + count
            packed += range(first, first + count)
            padded += range(begin, end)
            # Padding repeats any valid token; its keys and values land after the sequence's valid entries.
            padded += [max(0, end - 1)] * (self._seq - count)
            chosen += range(end - num_logits[index], end) if num_logits else ()
            begin = end
        self._packed_from[:begin], self._packed_from[begin:] = packed, 0
        self._padded_from.reshape(-1)[:] = self._padded_rows.reshape(-1, 2)[:, 1] = padded
        np.divmod(self._packed_from, self._seq, out=(self._packed_rows[:, 0], self._packed_rows[:, 1]))
        self._logits_index[: len(chosen)], self._logits_index[len(chosen) :] = chosen, 0

    def place(self, num_cached_tokens: Sequence[int], offsets: Sequence[int] = ()) -> None:
        """Place the tokens of sequence b in the cache slots from ``num_cached_tokens[b]`` on, and in positions that are larger by
        ``offsets[b]`` or, without offsets, the same."""
        seq = self._seq
        positions = num_cached_tokens
        if any(offsets):
            positions = [cached + offset for cached, offset in zip(num_cached_tokens, offsets, strict=True)]
        self._total[()] = max(num_cached_tokens) + seq
        if self._is_single_token:
            self._write_index[0] = self._seqlens_k[0] = num_cached_tokens[0]
            self._position_ids[0] = self._padded_position_ids[0] = positions[0]
            return
        self._write_index[:] = num_cached_tokens
        if self._is_decode:  # assignments are several times faster than the arithmetic below
            self._seqlens_k[:], self._position_ids[:] = num_cached_tokens, positions
            return
        self._seqlens_k[:] = [count + seq - 1 for count in num_cached_tokens]
        first = self._write_index if positions is num_cached_tokens else np.array(positions)
        np.add(first[:, None], self._offsets, out=self._padded_position_ids)
        np.take(self._padded_position_ids.ravel(), self._packed_from, out=self._position_ids, mode="clip")


class RowEnds:
    """How far each row of the caches is filled: padding may be written after that.

    Args:
        limit: slots of a row.
        sequence: how the tokens of a step are padded, see `RowPadding`.
    """

    def __init__(self, rows: int, limit: int, sequence: Rounding = NO_PADDING.sequence) -> None:
        self.ends = [0] * rows
        self.limit = limit
        self._sequence = sequence

    def fit(self, first: int, counts: Sequence[int], num_cached_tokens: Sequence[int]) -> bool:
        """Whether every row from ``first`` on has room for the longest one's tokens after what it holds."""
        longest = self._sequence.up(max(counts))
        rows = zip(counts, num_cached_tokens, self.ends[first : first + len(counts)], strict=True)
        return all((cached if count else end) + longest <= self.limit for count, cached, end in rows)

    def extend(self, first: int, counts: Sequence[int], num_cached_tokens: Sequence[int]) -> list[int]:
        """Extend the rows by a step's tokens. Returns the slot from which on each row is written; for a row without tokens that
        is the end of what it holds, because its padding is written too.
        """
        starts = list(num_cached_tokens)
        longest = self._sequence.up(max(counts))
        for row, count in enumerate(counts, first):
            if count:
                self.reach(row, starts[row - first] + count)
            else:  # in a full row, on the last token, to which no later one attends
                starts[row - first] = min(self.ends[row], self.limit - longest)
        return starts

    def reach(self, row: int, end: int) -> None:
        """The first ``end`` slots of the row are filled."""
        self.ends[row] = max(self.ends[row], end)

    def release(self, row: int) -> None:
        self.ends[row] = 0

    def move(self, source: int, target: int, num_cached_tokens: int) -> None:
        self.ends[target], self.ends[source] = num_cached_tokens, 0


def rounded_tokens(count: int, most: int) -> int:
    """Round ``count`` tokens of an uneven step up to at most ``most``, so that few shapes need bindings.

    The rounding costs least on the CPU: ONNX Runtime's matrix products process six tokens at a time with AVX2 (twelve with
    AVX-512), and one to four tokens of the last six take about the same time.
    """
    if count <= 4:
        return count
    sixes, rest = divmod(count - 1, 6)
    return min(most, 6 * sixes + (4 if rest < 4 else 6))


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least ``count``, for counts from 1 on."""
    return 1 << (count - 1).bit_length()
