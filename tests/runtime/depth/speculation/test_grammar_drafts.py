"""Drafts of a sequence whose output has a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from runtime.depth.speculation.made_up_speculator import made_up_speculator, made_up_state
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence


class Copies:
    """A text drafter that always guesses the same three tokens."""

    limit = 12

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            state.guess = Guess([4, 5, 6], [30, 31, 32], "ngram")
        return []


class OnlyFour:
    """A grammar that allows token 4 once, and forces nothing."""

    def forced(self) -> list[int]:
        return []

    def num_valid(self, tokens: Sequence[int]) -> int:
        return int(list(tokens[:1]) == [4])


def test_copies_that_the_grammar_refuses_are_not_drafted() -> None:
    """They cannot be accepted: their rows would be verified for nothing, and count as misses of the text."""
    speculator = made_up_speculator(None)
    speculator.text = [Copies()]
    state = made_up_state(speculator)
    state.sequence.grammar = cast(Any, OnlyFour())
    speculator.propose(cast(ExecutionContext, None), [state], [])
    assert list(state.guess.tokens) == [4]
    assert {draft.token for draft in state.drafts} <= {4}
