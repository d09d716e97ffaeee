"""Suffix automaton of a growing text: the longest end of the text that occurred before, found in constant time per token.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". Suffix matching for drafts: SuffixDecoding
(Oliaro et al. 2024, arXiv:2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable

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
