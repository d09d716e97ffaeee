"""A batch that always asks its exits: no plain steps first, no look at the clock, so that tests depend on neither."""

from __future__ import annotations

from tide_runtime.trial import TimedTrial


class AlwaysTried(TimedTrial):
    @property
    def asks(self) -> bool:
        return True

    def took(self, tokens: float, seconds: float) -> None:
        pass
