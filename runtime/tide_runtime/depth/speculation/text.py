"""Drafts at depth zero: tokens copied from where the longest end of the text went on before.

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) with the longest match instead of a fixed
number of tokens. The match comes from a suffix automaton (Blumer et al. 1985, "The smallest automaton recognizing the subwords of
a text"), in constant time per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import NO_GUESS, Guess, SpeculativeSequence

ROOT = 0


class SuffixAutomaton:
    """The substrings of ``text``, grouped into states by where they end.

    Attributes:
        text: tokens so far.
        state: of the longest end of the text that occurred before; its length is ``length[state]``, 0 where there is none.
        length: state → tokens of its longest substring.
        end: state → where a late occurrence of its substrings ends, as an index into ``text``.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.state = ROOT
        self.length, self.end = [0], [0]
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # state → state of the longest end of its substrings that occurs in more places
        self._last = ROOT  # state of the whole text

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``; amortised constant time for each."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        following = self._next
        link = self._link
        length = self.length
        end = self.end
        end[self.state] = len(self.text)  # the match before this token also ended there
        self.text.append(token)
        whole = self._add({}, len(self.text), len(self.text))
        at = self._last
        self._last = whole
        while at >= 0 and token not in following[at]:
            following[at][token] = whole
            at = link[at]
        if at < 0:
            self.state = link[whole] = ROOT
            return
        known = following[at][token]
        if length[known] > length[at] + 1:  # its longer substrings end in fewer places from now on
            shorter = self._add(dict(following[known]), length[at] + 1, end[known])
            link[shorter] = link[known]
            link[known] = shorter
            while at >= 0 and following[at].get(token) == known:
                following[at][token] = shorter
                at = link[at]
            known = shorter
        self.state = link[whole] = known

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self.length.append(length)
        self.end.append(end)
        return len(self._next) - 1


@dataclass
class SequenceText:
    """The text of one sequence."""

    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def guess(self, tokens: NDArray[np.int64], end: int, limit: int) -> Guess:
        """Up to ``limit`` tokens likely to follow ``tokens[:end]``, and how many tokens before each match. From one call to the
        next ``end`` never falls, and no token before it changes.

        Where the earlier place runs into the present, the text repeats with that period, and the guess goes on repeating.
        """
        text = self.text
        text.extend(tokens[len(text.text) : end].tolist())
        matched = text.length[text.state]
        if not matched or limit < 1:
            return NO_GUESS
        start = text.end[text.state]
        copied = text.text[start : start + limit]
        if len(copied) < limit:
            copied = (copied * -(-limit // len(copied)))[:limit]
        return Guess(copied, range(matched, matched + limit), "ngram")


class TextDrafter:
    """Guesses how the text of each sequence goes on, from itself."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            if state.history is None:
                state.history = SequenceText()
            state.guess = state.history.guess(state.tokens, state.sequence.num_tokens, min(self.limit, state.room))
        return []
