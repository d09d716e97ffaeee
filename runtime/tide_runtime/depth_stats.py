"""What a depth policy did for one row: drafts, deep passes, and how deep each output token went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class DepthStats:
    """Counts of one row.

    Args:
        drafted, accepted: drafts proposed and those that the model confirmed, by drafter (``router``, ``ngram``).
        deep_passes: runs to the last layer.
        exit_time: seconds of steps in which exits were asked or copies placed, up to where the rest of the layers began.
        forced: tokens that stopped early only to keep a depth budget.
        prompt_exits: prompt tokens that stopped early.
        token_depths: of each output token after the first, the layers run before it was final (or first proposed, for
            accepted drafts): 0 for tokens copied by the n-gram drafter, L for those that the whole model produced.
    """

    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    deep_passes: int = 0
    exit_time: float = 0.0
    forced: int = 0
    prompt_exits: int = 0
    token_depths: list[int] = field(default_factory=list)

    def record(self, sources: Sequence[str], depths: Sequence[int], accepted: int, last: int) -> None:
        """A deep pass over drafts from ``sources`` at ``depths``: the first ``accepted`` held, and it gave one token more."""
        for source in sources:  # Counter.update takes several times as long
            self.drafted[source] += 1
        for source in sources[:accepted]:
            self.accepted[source] += 1
        self.token_depths += depths[:accepted]
        self.record_plain(last)

    def record_plain(self, last: int) -> None:
        """A deep pass that gave one token."""
        self.deep_passes += 1
        self.token_depths.append(last)
