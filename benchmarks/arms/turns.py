"""Arms that run the same prompts side by side, so that a ratio compares neighbours in time.

The arms share a process. Arms with processes of their own are compared in whole rounds: see `tide_bench.rounds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol, runtime_checkable

from tide_runtime import GenerationParams

from benchmarks.arms.launch_log import Launch

Group = Sequence[Sequence[int]]  # prompts of one turn, [N][S] token ids
SLICE = 4  # tokens of each sequence that an arm and the baseline generate alternately


@dataclass(frozen=True)
class Turn:
    """One group of prompts, continued by one arm.

    Args:
        tokens: the new tokens of each prompt.
        seconds: of decoding: everything but the prompts' own passes.
        launches: while decoding, counted at the backend; empty for other libraries.
        layers_per_token: decoder layers launched per token of a sequence; None for other libraries.
        depth: mean layers run for a token.
        drafted, accepted: drafts by drafter.
        base_seconds: of the baseline's turn beside this one, or the mean of two around it; 0 outside `take_turns`.
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
        """Tokens of all sequences that ``seconds`` went into."""
        return sum(len(row) - 1 for row in self.tokens)


class Arm(Protocol):
    """A way to run the model. ``most_groups``: how many groups it takes part in; None: all."""

    most_groups: int | None

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        """Continue ``prompts``, ``rows`` at once; a prompt that waits takes the place of one that is finished."""


class Play(Protocol):
    """A turn that pauses between steps; its clock stands still meanwhile."""

    def advance(self, tokens: int) -> bool:
        """Generate until all sequences together have ``tokens``; False when they end before that."""

    def turn(self) -> Turn:
        """The result, at the end."""


@runtime_checkable
class PausingArm(Arm, Protocol):
    """An arm that can run step by step."""

    def start(self, prompts: Group, params: GenerationParams, rows: int) -> Play:
        """A turn, to be advanced."""


def take_turns(
    baseline: PausingArm, arms: Mapping[str, Arm], groups: Iterable[Group], params: GenerationParams, rows: int, first: int = 0
) -> tuple[list[Turn], dict[str, list[Turn]]]:
    """Every arm's turn at each of ``groups``, ``rows`` prompts at once, and the baseline's beside it; group g is sampled with
    seed g. ``first``: the number of the first one.

    The order of the arms turns, so that none always follows the same one. Returns the baseline's last turn at each group with
    its mean time there, and the arms' turns.
    """
    base: list[Turn] = []
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    for number, prompts in enumerate(groups, first):
        seeded = replace(params, seed=number)
        names = [name for name, arm in arms.items() if arm.most_groups is None or number < arm.most_groups]
        shift = number % max(1, len(names))
        beside: list[Turn] = []
        for name in names[shift:] + names[:shift]:
            theirs, own = _beside(baseline, arms[name], prompts, seeded, rows, arm_first=bool(number % 2))
            turns[name].append(replace(own, base_seconds=theirs.seconds))
            beside.append(theirs)
        last = beside[-1] if beside else baseline.turn(prompts, seeded, rows)
        seconds = fmean(turn.seconds for turn in beside or [last])
        base.append(replace(last, seconds=seconds, base_seconds=seconds))
    return base, turns


def _beside(
    baseline: PausingArm, arm: Arm, prompts: Group, params: GenerationParams, rows: int, arm_first: bool
) -> tuple[Turn, Turn]:
    """The baseline's and the arm's turns at the same prompts, as close in time as they can be.

    In slices of a few tokens, now one first, now the other, where both can pause: the speed of a shared machine changes within
    tenths of a second. Otherwise between two turns of the baseline, whose mean counts.
    """
    if not isinstance(arm, PausingArm):
        before, own, after = (one.turn(prompts, params, rows) for one in (baseline, arm, baseline))
        return replace(after, seconds=fmean((before.seconds, after.seconds))), own
    theirs, own_play = (one.start(prompts, params, rows) for one in (baseline, arm))
    running = [own_play, theirs] if arm_first else [theirs, own_play]
    generated = 0
    while running:
        generated += SLICE * rows
        running = [play for play in running if play.advance(generated)][::-1]
    return theirs.turn(), own_play.turn()
