"""Arms that run the same prompts one after the other, so that a ratio compares neighbours in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """

    tokens: list[list[int]]
    seconds: float
    launches: Counter[Launch] = field(default_factory=Counter)
    layers_per_token: float | None = None
    depth: float | None = None
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

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
    baseline: Arm, arms: Mapping[str, Arm], groups: Iterable[Group], params: GenerationParams, rows: int
) -> tuple[list[Turn], dict[str, list[Turn]]]:
    """The baseline's turn and every arm's at each of ``groups``, ``rows`` prompts at once; group g is sampled with seed g.

    The baseline runs before and after the others and counts with its mean time. The order of the others turns, so that none
    always follows the same one.
    """
    base: list[Turn] = []
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    for number, prompts in enumerate(groups):
        seeded = replace(params, seed=number)
        names = [name for name, arm in arms.items() if arm.most_groups is None or number < arm.most_groups]
        shift = number % max(1, len(names))
        before = baseline.turn(prompts, seeded, rows)
        for name in names[shift:] + names[:shift]:
            turns[name].append(arms[name].turn(prompts, seeded, rows))
        after = baseline.turn(prompts, seeded, rows)
        base.append(replace(after, seconds=(before.seconds + after.seconds) / 2))
    return base, turns
