"""Drafts at depth zero: tokens copied from where the longest end of the text went on before, in the text or in recent outputs.

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) with the longest match instead of a fixed
number of tokens, and a pool of outputs beside the text (SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.drafting.suffix_automaton import ROOT, SuffixAutomaton

_BOUNDARY = -1  # between the outputs of a pool; no token has this id


class TextGuess(NamedTuple):
    """``tokens`` likely to follow; the ``matched`` tokens before them stood before what is copied.

    ``forced``: a grammar allows no others.
    """

    tokens: list[int]
    matched: int
    forced: bool = False

    @property
    def evidence(self) -> range:
        """Matched tokens before each token, see `HitRates`."""
        return range(self.matched, self.matched + len(self.tokens))


NO_GUESS = TextGuess([], 0)


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
class TextDrafter:
    """The drafter of one sequence."""

    pool: TextPool | None = None
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    _cursors: list[_Cursor] = field(default_factory=list)

    def guess(self, tokens: NDArray[np.int64], end: int, limit: int) -> TextGuess:
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
                return TextGuess(copied, best.matched)
        if not matched or limit < 1:
            return NO_GUESS
        start = text.end[text.state]
        copied = text.text[start : start + limit]
        return TextGuess(copied if len(copied) == limit else (copied * -(-limit // len(copied)))[:limit], matched)

    def _best_cursor(self, pool: TextPool, new: Sequence[int]) -> _Cursor | None:
        """The cursor with the longest match, after the ``new`` tokens."""
        known = {id(cursor.automaton): cursor for cursor in self._cursors}
        self._cursors = [known.get(id(automaton)) or _Cursor(automaton) for automaton in pool.automata if automaton.text]
        for cursor in self._cursors:
            cursor.follow(new)
        return max(self._cursors, key=lambda cursor: cursor.matched, default=None)
