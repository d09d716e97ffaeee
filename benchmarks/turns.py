"""Arms that run the same prompts one after the other, so that a ratio compares neighbours in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

from tide_runtime import GenerationParams

from benchmarks.launch_log import Launch

Group = Sequence[Sequence[int]]  # prompts of one turn, [N][S] token ids


@dataclass(frozen=True)
class Turn:
    """What an arm did with one group of prompts.

    Args:
        tokens: the new tokens of each prompt.
        seconds: of decoding: everything but the prompts' own passes.
        launches: while decoding, counted at the backend; empty for other libraries.
        layers_per_token: decoder layers launched per token of a row; None for other libraries.
        depth: mean layers run before a token was said.
        drafted, accepted: drafts by drafter.
        base_seconds: of the baseline beside this turn, the mean of its turns just before and just after; 0 outside `take_turns`.
    """

    tokens: list[list[int]]
    seconds: float
    launches: Counter[Launch] = field(default_factory=Counter)
    layers_per_token: float | None = None
    depth: float | None = None
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    base_seconds: float = 0.0

    @property
    def decoded(self) -> int:
        """Tokens of all rows that ``seconds`` went into."""
        return sum(len(row) - 1 for row in self.tokens)


class Arm(Protocol):
    """A way to run the model. ``most_groups``: how many groups it takes part in; None: all."""

    most_groups: int | None

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        """Continue ``prompts``, ``rows`` at once; a prompt that waits takes the place of one that is finished."""


def take_turns(
    baseline: Arm, arms: Mapping[str, Arm], groups: Iterable[Group], params: GenerationParams, rows: int, first: int = 0
) -> tuple[list[Turn], dict[str, list[Turn]]]:
    """The baseline's turn and every arm's at each of ``groups``, ``rows`` prompts at once; group g is sampled with seed g.
    ``first``: the number of the first one.

    The baseline runs before and after every other arm: the speed of a shared machine changes within seconds, and an arm that
    follows itself finds its weights in the caches. The order of the others turns, so that none always follows the same one.
    Returns the baseline's last turn at each group with its mean time there, and the arms' turns.
    """
    base: list[Turn] = []
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    for number, prompts in enumerate(groups, first):
        seeded = replace(params, seed=number)
        names = [name for name, arm in arms.items() if arm.most_groups is None or number < arm.most_groups]
        shift = number % max(1, len(names))
        beside = [baseline.turn(prompts, seeded, rows)]
        for name in names[shift:] + names[:shift]:
            own = arms[name].turn(prompts, seeded, rows)
            beside.append(baseline.turn(prompts, seeded, rows))
            turns[name].append(replace(own, base_seconds=fmean(turn.seconds for turn in beside[-2:])))
        seconds = fmean(turn.seconds for turn in beside)
        base.append(replace(beside[-1], seconds=seconds, base_seconds=seconds))
    return base, turns
