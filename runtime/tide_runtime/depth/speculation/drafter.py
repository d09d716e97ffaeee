"""The interface of all drafters: text, earlier replies, grammar, draft head, exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.depth.speculation.record import SpeculativeSequence


class Evaluation(NamedTuple):
    """An exit was evaluated for a token of each of ``batch_size`` sequences, run from segment ``first`` on; see
    `CostModel.evaluation`."""

    batch_size: int
    first: int
    exit: Exit
    with_head: bool


class Drafter(Protocol):
    """A source of drafts. It knows nothing of prices: the speculator decides when it is used, and what of it is verified."""

    limit: int
    """Most drafts of a sequence in one step."""

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        """Guess for ``states``, whose rows rise: into ``guess`` or ``successor_guess``, one more token into ``head_guess``, or,
        from exits, one more of the ``drafts`` where an exit is confident. Returns the exits evaluated for it."""
