"""Text drafts in a simulation: the runtime's own drafters, record and choice of lengths, on a text that is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tide_runtime.depth.speculation.lengths import choose_lengths
from tide_runtime.depth.speculation.record import NO_GUESS, TrackRecord
from tide_runtime.depth.speculation.successors import SequenceSuccessors, SuccessorTable
from tide_runtime.depth.speculation.text import SequenceText
from tide_runtime.depth_tuning import DepthTuning

from tide_calibrate.traces.trace import OwnText

TUNING = DepthTuning()


class TextDrafts:
    """One sequence whose text is known.

    Args:
        text: the tokens that the sequence will have generated.
        pass_ms: [text_draft_limit + 2] ms of a pass through the whole model, by number of tokens.
        speedup: of drafting with exits; 1 without exits.
        table: successors in earlier texts.
    """

    def __init__(
        self, text: OwnText, pass_ms: NDArray[np.float64], speedup: float, tuning: DepthTuning, table: SuccessorTable
    ) -> None:
        self._text, self._speedup, self._pass_ms = text, speedup, pass_ms.tolist()
        self._tuning, self._record, self._guesses = tuning, TrackRecord(tuning), (NO_GUESS, NO_GUESS)
        self._history, self._successors = SequenceText(), SequenceSuccessors(table)

    def draft(self, position: int) -> tuple[int, int]:
        """How many tokens are drafted when ``position`` new ones are known, and how many of them are right."""
        tokens, end = self._text.tokens, self._text.prompt + position
        limit = min(self._tuning.text_draft_limit, len(tokens) - end - 1)
        self._guesses = (self._history.guess(tokens, end, limit), self._successors.guess(tokens, end, limit))
        guess, chances = self._record.best(*self._guesses)
        if not guess.tokens:
            return 0, 0
        ((count,), _) = choose_lengths([chances], self._pass, self._tuning.padding_penalty, self._speedup)
        right = 0
        while right < count and guess.tokens[right] == tokens[end + right]:
            right += 1
        return count, right

    def learn(self, position: int, made: int) -> None:
        """Compare the last guesses with the ``made`` tokens that followed the first ``position`` new ones."""
        end = self._text.prompt + position
        new = self._text.tokens[end : end + made].tolist()
        for guess in self._guesses:
            self._record.observe(guess, new)
        self._successors.learn(self._text.tokens, end, new)

    def _pass(self, _batch_size: int, tokens: int, _longest: int) -> float:
        return self._pass_ms[tokens]
