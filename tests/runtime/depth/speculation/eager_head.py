"""A draft head that guesses whenever it has room, as if that cost nothing, and of which all guesses are verified."""

import pytest
from tide_runtime.depth.speculation import speculator
from tide_runtime.depth.speculation.lengths import DraftLengths
from tide_runtime.depth.speculation.record import SpeculativeSequence
from tide_runtime.depth.speculation.speculator import Speculator


def guess_always(monkeypatch: pytest.MonkeyPatch, guesses: int) -> None:
    """Let the head guess ``guesses`` tokens at a time."""

    def pays(self: Speculator, states: list[SpeculativeSequence], pairs: tuple, launches: int, prompt_tokens: int) -> bool:
        return launches < min(guesses, *(state.head_room for state in states if state.head_room))

    monkeypatch.setattr(Speculator, "head_pays", pays)
    monkeypatch.setattr(speculator, "choose_lengths", lambda drafts, *_: DraftLengths([len(chances) for chances in drafts], 1.0))
