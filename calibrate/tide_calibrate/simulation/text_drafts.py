"""Text drafts in a simulation: the runtime's own drafter and controller, on a text that is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.backoff import Backoff
from tide_runtime.drafting.controller import DraftState, affordable, lengths_to_verify
from tide_runtime.drafting.text_drafter import TextDrafter, TextPool

from tide_calibrate.traces.trace import OwnText

TUNING = DepthTuning()


class TextDrafts:
    """One sequence whose text is known.

    Args:
        text: the tokens that the sequence will have generated.
        pass_ms: [text_draft_limit + 2] ms of a pass through the whole model, by number of tokens.
        speedup: of drafting with exits; 1 without exits.
        pool: outputs of earlier texts.
    """

    def __init__(
        self, text: OwnText, pass_ms: NDArray[np.float64], speedup: float, tuning: DepthTuning, pool: TextPool | None = None
    ) -> None:
        self._text, self._speedup, self._pass_ms = text, speedup, pass_ms.tolist()
        self._count = 0
        self._tuning, self._state = tuning, DraftState(tuning, Backoff(tuning, 1.0), TextDrafter(pool))

    def draft(self, position: int) -> tuple[int, int]:
        """How many tokens are drafted when ``position`` new ones are known, and how many of them are right."""
        tokens, end, state = self._text.tokens, self._text.prompt + position, self._state
        self._count = 0
        state.guess = state.text.guess(tokens, end, min(self._tuning.text_draft_limit, len(tokens) - end - 1))
        if not state.guess.tokens:
            return 0, 0
        chances = affordable(state.ledger, state.text_chances, self._pass, 1)
        (count,) = lengths_to_verify([chances], self._pass, self._speedup, self._tuning)
        self._count = count
        right = 0
        while right < count and state.guess.tokens[right] == tokens[end + right]:
            right += 1
        return count, right

    def learn(self, position: int, made: int) -> None:
        """Compare the last guess with the ``made`` tokens that followed the first ``position`` new ones."""
        end = self._text.prompt + position
        self._state.observe_tokens(self._text.tokens[end : end + made].tolist())
        self._state.ledger.settle(made, self._pass_ms[self._count + 1] / self._pass_ms[1] - 1, made - 1)

    def finish(self, pool: TextPool) -> None:
        """The sequence has ended; its output may draft for others."""
        pool.add(self._text.tokens[self._text.prompt :].tolist())

    def _pass(self, _batch_size: int, tokens: int, _longest: int) -> float:
        return self._pass_ms[tokens]
