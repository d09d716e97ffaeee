"""Drafts of early exits: the tokens that exit heads choose where their routers are confident.

A drafted token is run to a checkpoint only, and waits there for the verification pass (self-speculative decoding: LayerSkip,
Elhoushi et al. 2024; Kangaroo, Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.depth.executor import Executor
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import SpeculativeSequence


class ExitDrafter:
    """Adds one more draft where an exit is confident.

    Args:
        exits: those that may draft, shallow first.
    """

    def __init__(self, executor: Executor, exits: Sequence[Exit], limit: int) -> None:
        self.executor = executor
        self.exits = exits
        self.limit = limit

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        evaluations = list[Evaluation]()
        unsure = list(states)
        first = 0
        for early_exit in self.exits:
            everyone = range(len(unsure))
            threshold = early_exit.info.exact_threshold
            self.executor.advance(context, unsure, everyone, first, early_exit.boundary)
            guesses = self.executor.evaluate(context, unsure, everyone, early_exit, [threshold] * len(unsure))
            with_head = any(guess.logits is not None for guess in guesses)
            evaluations.append(Evaluation(len(unsure), first, early_exit, with_head))
            still = list[SpeculativeSequence]()
            first = early_exit.boundary
            for state, guess in zip(unsure, guesses, strict=True):
                if guess.logits is None or not guess.score >= threshold:  # a NaN is no confidence
                    still.append(state)
                    continue
                # A sampled draft is drawn with the noise of its position, as the verification's token will be.
                token = state.sequence.pick(guess.logits, guess.token, state.num_tokens_with_drafts)
                state.place(token, "router", early_exit.layers)
            unsure = still
            if not unsure:
                break
        return evaluations
