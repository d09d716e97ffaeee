"""Arms that run the same prompts in turn in this process, so that a ratio compares neighbours in time.

Arms with processes of their own are compared in whole rounds: see `tide_bench.rounds`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from tide_bench.arms.base import with_limitation
from tide_bench.arms.tide import limitation, mean_depth
from tide_runtime import Engine, GenerationParams

Group = Sequence[Sequence[int]]  # prompts of one turn, [N][S] token ids


@dataclass(frozen=True)
class Turn:
    """One group of prompts, continued by one arm.

    Args:
        tokens: the new tokens of each prompt.
        seconds: of decoding: what follows the last prompt's first token.
        layers_per_token: decoder layers launched per token of a sequence.
        depth: mean layers run for a token.
        drafted, accepted: drafts by drafter.
        passes: runs to the last layer, of all sequences.
        base_seconds: of the baseline's turn beside this one; 0 outside `take_turns`.
    """

    tokens: list[list[int]]
    seconds: float
    layers_per_token: float = 0.0
    depth: float = 0.0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    base_seconds: float = 0.0

    @property
    def decoded(self) -> int:
        """Tokens of all sequences that ``seconds`` went into."""
        return sum(len(row) - 1 for row in self.tokens)


@dataclass(frozen=True)
class EngineArm:
    """An engine under the name of a row."""

    name: str
    engine: Engine

    @property
    def title(self) -> str:
        """The title, and the policy that the engine runs where it is not the one asked for."""
        return with_limitation(self.name, limitation(self.engine))

    def turn(self, prompts: Group, params: GenerationParams) -> Turn:
        """Continue ``prompts`` together. The cache salt of ``params`` says whose outputs may draft."""
        done = self.engine.generate([list(prompt) for prompt in prompts], params)
        stats = [one.stats for one in done]
        first = max(one.time_to_first_token for one in stats)
        return Turn(
            tokens=[list(one.token_ids) for one in done],
            seconds=max(one.time_to_first_token + one.decode_time for one in stats) - first,
            layers_per_token=fmean(one.layers_per_token for one in stats),
            depth=mean_depth(done, self.engine.depth),
            drafted=sum((Counter(one.drafted) for one in stats), Counter()),
            accepted=sum((Counter(one.accepted) for one in stats), Counter()),
            passes=sum(one.deep_passes for one in stats),
        )


def take_turns(
    baseline: EngineArm, arms: Mapping[str, EngineArm], groups: Iterable[Group], params: GenerationParams
) -> tuple[list[Turn], dict[str, list[Turn]]]:
    """Every arm's turn at each of ``groups``, and the baseline's beside it; group g is sampled with seed g.

    The order of the arms turns, so that none always follows the same one, and so does the arm that begins. A cache salt for each
    pair keeps outputs from drafting for later turns. Returns the baseline's last turn at each group with its mean time there,
    and the arms' turns.
    """
    base: list[Turn] = []
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    for number, prompts in enumerate(groups):
        names = list(arms)
        beside = list[Turn]()
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            own = replace(params, seed=number, cache_salt=f"group {number}, {name}")
            pair = [arms[name], baseline] if number % 2 else [baseline, arms[name]]
            taken = [arm.turn(prompts, own) for arm in pair]
            ours, theirs = taken if number % 2 else taken[::-1]
            turns[name].append(replace(ours, base_seconds=theirs.seconds))
            beside.append(theirs)
        seconds = fmean(turn.seconds for turn in beside)
        base.append(replace(beside[-1], seconds=seconds, base_seconds=seconds))
    return base, turns
