"""How much to train in the time given: step times measured beforehand in, numbers of steps and kinds of heads out.

Every kind of head is trained after the deepest candidate, where exits agree most. Where the time does not suffice for all kinds
after all candidates, the kinds that agreed best there go on to the others.

The number of steps is chosen before training, from few levels, so that two runs on one machine usually train the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tide_calibrate.config import CalibrationConfig

STEPS, STEPS_FROM_NEIGHBOUR = 120, 48
_LEVELS = (4.0, 2.0, 1.0, 0.5, 0.25)
_MINUTES_SHARE = (
    0.22  # share of the minutes; capture, continuations, the draft head, step costs and the certificate take the rest
)
# A router's head runs forward on 80 windows, in a third of the time that steps of two of them take.
_ROUTER_STEPS = 14
_TRACE_STEPS = 14  # training batches whose forward pass takes as long as the traces


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained.

    Args:
        level: of `STEPS` and `STEPS_FROM_NEIGHBOUR`.
        step_seconds: kind → seconds of a training step in one thread.
        heads: kind → number of heads, one at each candidate.
        budget: seconds for heads, routers and traces.
        workers: threads.
    """

    level: float
    step_seconds: Mapping[str, float]
    heads: Mapping[str, int]
    budget: float
    workers: int

    @property
    def steps(self) -> int:
        """Steps of a head that starts untrained."""
        return round(STEPS * self.level)

    @property
    def steps_from_neighbour(self) -> int:
        """Steps of a head that starts from the weights of its deeper neighbour."""
        return round(STEPS_FROM_NEIGHBOUR * self.level)

    @property
    def router_share(self) -> float:
        """Share of the windows that routers are trained on by default; half of them still have 8,000 tokens."""
        return min(1.0, max(0.5, self.level))

    @property
    def router_steps(self) -> float:
        """Time of a router, in steps of its head."""
        return _ROUTER_STEPS * self.router_share

    def deepest_seconds(self, kind: str) -> float:
        """Seconds of training the head after the deepest candidate in one thread."""
        return 0.0 if kind == "identity" else self.step_seconds[kind] * self.steps

    def chain_seconds(self, kind: str) -> float:
        """Seconds of training the heads after all other candidates in one thread."""
        return 0.0 if kind == "identity" else self.step_seconds[kind] * self.steps_from_neighbour * (self.heads[kind] - 1)

    def seconds(self, continued: Iterable[str]) -> float:
        """Estimated time of heads, routers and traces; only kinds in ``continued`` have heads after more than one candidate.

        The heads of a kind are trained one after another.
        """
        kinds = set(continued)
        stages = [[self.deepest_seconds(kind) for kind in self.heads], [self.chain_seconds(kind) for kind in kinds]]
        trained = sum(max([sum(stage) / self.workers, *stage]) for stage in stages)
        return trained + self._forward_seconds(kinds, self.router_steps + _TRACE_STEPS) / self.workers

    def continued_work(self, continued: Iterable[str]) -> float:
        """Seconds of training that is left once the deepest heads are trained, in one thread; traces are left out."""
        kinds = set(continued)
        return sum(self.chain_seconds(kind) for kind in kinds) + self._forward_seconds(kinds, self.router_steps)

    def _forward_seconds(self, continued: Iterable[str], steps: float) -> float:
        """Seconds that ``steps`` take of every head in one thread, whether it has weights to train or not."""
        kinds = set(continued)
        return sum(steps * step * (self.heads[kind] if kind in kinds else 1) for kind, step in self.step_seconds.items())

    def affordable(self, ranking: Sequence[str]) -> list[str]:
        """The kinds that go on to all candidates: each in ``ranking``, best first, that fits with those chosen before it."""
        chosen: list[str] = []
        for kind in ranking:
            if self.seconds([*chosen, kind]) <= self.budget:
                chosen.append(kind)
        return chosen

    def __str__(self) -> str:
        times = ", ".join(f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in self.step_seconds.items())
        text = f"{self.steps} steps for the deepest head of a kind, {self.steps_from_neighbour} for the others ({times} a step)"
        return f"{text}: about {self.seconds(self.heads):.0f} s for all with routers and traces, of {self.budget:.0f} s"


def plan_training(step_seconds: Mapping[str, float], heads: Mapping[str, int], minutes: float, workers: int) -> TrainingPlan:
    """The most steps at which all kinds fit after all candidates, or else at which any one kind does; at least the fewest.

    More steps than the default need more minutes than the default.

    Args:
        step_seconds: kind → seconds of a training step in one thread.
        heads: kind → number of heads.
    """
    max_level = max(1.0, minutes / CalibrationConfig.minutes)
    plans = [
        TrainingPlan(level, step_seconds, heads, minutes * 60 * _MINUTES_SHARE, workers)
        for level in _LEVELS
        if level <= max_level
    ]
    for groups in ([list(heads)], [[kind] for kind in heads]):
        for plan in plans:
            if all(plan.seconds(group) <= plan.budget for group in groups):
                return plan
    return plans[-1]
