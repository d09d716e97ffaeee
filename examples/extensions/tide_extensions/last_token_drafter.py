"""A drafter that copies what followed the last token where it stood before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence


class LastTokenDrafter:
    """``limit``: most tokens of a guess."""

    def __init__(self, limit: int, manifest: Manifest) -> None:
        self.limit = limit

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        for state in states:
            tokens = state.tokens[: state.sequence.num_tokens]
            places = np.flatnonzero(tokens[:-1] == tokens[-1])
            if len(places):
                copied = tokens[places[-1] + 1 :][: self.limit].tolist()
                state.guess = Guess(copied, [0.5] * len(copied), "last-token")
        return []
