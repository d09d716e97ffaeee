"""Drafts at depth zero: tokens copied from where the longest end of the text went on before, in the text or in recent outputs.

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) with the longest match instead of a fixed
number of tokens, and a pool of recent outputs (SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975). The match comes from a
suffix automaton (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"), in constant time per token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import NO_GUESS, Guess, SpeculativeSequence

ROOT = 0
_BOUNDARY = -1  # between the outputs of a pool; no token has this id


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
        following, link, length, end = self._next, self._link, self.length, self.end
        end[self.state] = len(self.text)  # the match before this token also ended there
        self.text.append(token)
        whole, at = self._add({}, len(self.text), len(self.text)), self._last
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

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest end of another text that occurs here, when ``token`` follows its end of ``matched`` tokens in ``state``.

        Returns its state and its number of tokens.
        """
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            matched = self.length[state]
        following = self._next[state].get(token)
        return (ROOT, 0) if following is None else (following, matched + 1)


class TextPool:
    """Outputs of an engine, the most recent ``most_tokens`` / 2 to ``most_tokens`` of them.

    Automata cannot forget a text, so there are two: outputs go into the newer one, and when it is half full the older one is
    dropped.
    """

    def __init__(self, most_tokens: int) -> None:
        self._half = most_tokens // 2
        self.automata = [SuffixAutomaton()]

    @property
    def tokens(self) -> int:
        return sum(len(automaton.text) for automaton in self.automata)

    def add(self, output: Sequence[int]) -> None:
        """Add the latest ``most_tokens`` / 2 tokens of ``output``."""
        output = output[-self._half :]
        if len(self.automata[-1].text) + len(output) > self._half:
            self.automata = [self.automata[-1], SuffixAutomaton()]
        self.automata[-1].extend([*output, _BOUNDARY])


class TextPools:
    """A pool for each cache salt: texts with different salts never draft for each other.

    Args:
        most_tokens: of all pools; those that were used last are kept. A token takes about 400 bytes. 0: no pools.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._pools: OrderedDict[str | None, TextPool] = OrderedDict()

    def of(self, salt: str | None) -> TextPool | None:
        if not self._most_tokens:
            return None
        pool = self._pools.setdefault(salt, TextPool(self._most_tokens))
        self._pools.move_to_end(salt)
        while sum(kept.tokens for kept in self._pools.values()) > self._most_tokens and len(self._pools) > 1:
            self._pools.popitem(last=False)
        return pool


@dataclass
class _Cursor:
    """The longest end of a sequence's text that occurs in ``automaton``: ``matched`` tokens, which end in ``state``."""

    automaton: SuffixAutomaton
    state: int = ROOT
    matched: int = 0

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state, self.matched = self.automaton.follow(self.state, self.matched, token)


@dataclass
class SequenceText:
    """The text of one sequence, and where its end occurs in the outputs of ``pool``."""

    pool: TextPool | None = None
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    _cursors: list[_Cursor] = field(default_factory=list)

    def guess(self, tokens: NDArray[np.int64], end: int, limit: int) -> Guess:
        """Up to ``limit`` tokens likely to follow ``tokens[:end]``. From one call to the next ``end`` never falls, and no token
        before it changes.

        Where the earlier place runs into the present, the text repeats with that period, and the guess goes on repeating.
        """
        text = self.text
        new = tokens[len(text.text) : end].tolist()
        text.extend(new)
        matched = text.length[text.state]
        if self.pool is not None and (best := self._best_cursor(self.pool, new)) is not None and best.matched > matched:
            start = best.automaton.end[best.state]
            copied = best.automaton.text[start : start + limit]
            if _BOUNDARY in copied:
                copied = copied[: copied.index(_BOUNDARY)]
            if copied:
                return _copied(copied, best.matched)
        if not matched or limit < 1:
            return NO_GUESS
        start = text.end[text.state]
        copied = text.text[start : start + limit]
        return _copied(copied if len(copied) == limit else (copied * -(-limit // len(copied)))[:limit], matched)

    def _best_cursor(self, pool: TextPool, new: Sequence[int]) -> _Cursor | None:
        """The cursor with the longest match, after the ``new`` tokens."""
        known = {id(cursor.automaton): cursor for cursor in self._cursors}
        self._cursors = [known.get(id(automaton)) or _Cursor(automaton) for automaton in pool.automata if automaton.text]
        for cursor in self._cursors:
            cursor.follow(new)
        return max(self._cursors, key=lambda cursor: cursor.matched, default=None)


def _copied(tokens: Sequence[int], matched: int) -> Guess:
    """The more tokens before a copied one match, the likelier it is."""
    return Guess(tokens, range(matched, matched + len(tokens)), "ngram")


class TextDrafter:
    """Guesses how the text of each sequence goes on, from itself and from outputs of the same cache salt."""

    def __init__(self, limit: int, pool_tokens: int) -> None:
        self.limit, self._pools = limit, TextPools(pool_tokens)
        self._started: list[SpeculativeSequence] = []  # and not yet seen to have ended

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            if state.history is None:
                state.history = self._start(state)
            state.guess = state.history.guess(state.tokens, state.sequence.num_tokens, min(self.limit, state.room))
        return []

    def _start(self, state: SpeculativeSequence) -> SequenceText:
        """The history of a new sequence, for which outputs that have ended may draft."""
        running = []
        for one in self._started:
            if one.sequence.finish_reason is None and one.sequence.error is None:
                running.append(one)
            elif one.history.pool is not None:
                one.history.pool.add(one.sequence.new_tokens.tolist())
        self._started = [*running, state]
        params = state.sequence.params
        return SequenceText(self._pools.of(params.cache_salt) if params.use_prefix_cache else None)
