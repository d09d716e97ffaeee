"""How deep each token of a sequence has been run: the record that lazy depth keeps.

Layers run in order and a deeper run takes along everything that waits, so depth falls along the text: the first
``done[i]`` tokens have been through segment i, and ``done`` never rises from one segment to the next. The tokens in between,
positions ``done[i]`` … ``done[i - 1] - 1``, wait in front of segment i: their hidden states are kept here, their keys and
values of the segments they have been through are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_runtime.sequence import TokenSequence


class Frontier:
    """One sequence's record.

    Args:
        room: most tokens that may wait in front of one segment.
        like: an array of hidden states; states are kept where it is, on the host or on a device.
    """

    def __init__(self, segments: int, hidden_width: int, room: int, like: NDArray[np.generic], length: int) -> None:
        self.done = [length] * segments
        self.room = room
        # [i]: what waits in front of segment i; in front of segment 0 token ids wait
        self.states = [np.empty_like(like, shape=(room, hidden_width)) for _ in range(segments)]

    def waiting(self, segment: int) -> int:
        """Tokens in front of ``segment`` (> 0)."""
        return self.done[segment - 1] - self.done[segment]

    def arrive(self, first: int, end: int, states: NDArray[np.generic]) -> None:
        """Tokens with ``states`` [S, H] went through segments ``first`` … ``end - 1`` and now wait at ``end``."""
        before = self.waiting(end)
        self.states[end][before : before + len(states)] = states
        self.pass_through(first, end, len(states))

    def pass_through(self, first: int, end: int, count: int) -> None:
        """``count`` tokens went through segments ``first`` … ``end - 1``."""
        for segment in range(first, end):
            self.done[segment] += count

    def newest(self, boundary: int) -> NDArray[np.generic]:
        """The state [H] of the last token, which stands in front of segment ``boundary``."""
        return self.states[boundary][self.waiting(boundary) - 1]

    def reset(self, length: int) -> None:
        """The first ``length`` tokens have been through every segment."""
        self.done = [length] * len(self.done)

    def roll_back(self, length: int) -> None:
        """Forget every token from position ``length`` on; cache entries from there on are overwritten when they are reached."""
        self.done = [min(done, length) for done in self.done]


@dataclass
class LazySequence:
    """A sequence as the executor runs it. Policies derive their state of a sequence from it (``TokenSequence.policy_state``).

    Args:
        num_drafts: tokens after the first ``sequence.num_tokens`` that are not output yet.
    """

    sequence: TokenSequence
    frontier: Frontier
    num_drafts: int = 0

    @classmethod
    def of_chunk(cls, frontier: Frontier, sequence: TokenSequence, count: int) -> LazySequence:
        """A prompt whose next ``count`` tokens are run."""
        return cls(sequence, frontier, sequence.num_cached_tokens + count - sequence.num_tokens)

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self.sequence.tokens

    @property
    def num_tokens_with_drafts(self) -> int:
        """Tokens that can be run: prompt, output and drafts."""
        return self.sequence.num_tokens + self.num_drafts

    @property
    def room(self) -> int:
        """Drafts that still fit before the output, or the cache, is full, or the text takes other rotary factors: the last token
        is the model's own."""
        return self.sequence.last_end - self.num_tokens_with_drafts - 1
