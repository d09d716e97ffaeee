"""A drafter that a package outside TIDE registers in the entry point group ``tide.drafters``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.speculation.drafter import Drafter, Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence
from tide_runtime.plugins import DRAFTERS, extension


class PackageDrafter:
    """Drafts with the class registered as ``name``, which is constructed with ``limit`` and the manifest and puts guesses into
    `SpeculativeSequence.guess`. Its evidence for a token is a probability, 0 … 1.

    A guess is cut where it leaves the vocabulary or the room of its sequence; the model verifies the rest like any draft.

    Raises ParamsError where no package registers ``name``.
    """

    def __init__(self, name: str, limit: int, manifest: Manifest) -> None:
        self.name = name
        self.limit = limit
        self._vocab_size = manifest.model.vocab_size
        self._inner: Drafter = extension(DRAFTERS, name)(limit, manifest)

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        self._inner.draft(context, states)
        for state in states:
            tokens, evidence, _ = state.guess
            valid = takewhile(lambda token: 0 <= token < self._vocab_size, tokens[: max(0, min(self.limit, state.room))])
            state.guess = Guess([int(token) for token in valid], evidence, self.name)
        return []
