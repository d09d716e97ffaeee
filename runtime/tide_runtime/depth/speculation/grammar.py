"""Drafts that a request's grammar forces: the tokens of a structure about which it leaves no choice."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence


class GrammarDrafter:
    """Replaces the guess of a sequence where its grammar leaves no choice."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            grammar = state.sequence.grammar
            if grammar is not None and (forced := grammar.forced()[: min(self.limit, state.room)]):
                state.guess = Guess(forced, (), "grammar")
        return []


def allowed(state: SpeculativeSequence, guess: Guess) -> Guess:
    """The first tokens of ``guess`` that the sequence's grammar allows, if it has one."""
    grammar = state.sequence.grammar
    if grammar is None or not guess.tokens or guess.source == "grammar":
        return guess
    return guess._replace(tokens=guess.tokens[: grammar.num_valid(guess.tokens)])
