"""How much to train in the time given: step times measured beforehand in, kinds of heads and numbers of steps out.

The plan is made once, before training, and has few levels, so that two runs on one machine usually train the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tide_calibrate.config import CalibrationConfig
from tide_calibrate.exit_heads import parse_kind

STEPS, STEPS_FROM_NEIGHBOUR = 120, 48
_LEVELS = (4.0, 2.0, 1.0, 0.5, 0.25)
_SHARE = 0.17  # of the minutes; capture, continuations, the draft head, step costs and the certificate take the rest
# A router's head runs forward on 80 windows, in a third of the time that steps of two of them take.
_ROUTER_STEPS = 14
_TRACE_STEPS = 14  # as many windows are traced


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained.

    Args:
        level: of `STEPS` and `STEPS_FROM_NEIGHBOUR`.
        step_seconds: kind → seconds of a training step in one thread, of the kinds that are trained.
        heads: kind → number of heads, of all kinds that were asked for.
        budget: seconds for heads, routers and traces.
        workers: threads.
    """

    level: float
    step_seconds: dict[str, float]
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

    @property
    def seconds(self) -> float:
        """Estimated time of all heads, routers and traces; the heads of a kind are trained one after another."""
        chains = {kind: step * self._chain_steps(kind) for kind, step in self.step_seconds.items()}
        others = sum(step * self.heads[kind] * (self.router_steps + _TRACE_STEPS) for kind, step in self.step_seconds.items())
        return max([sum(chains.values()) / self.workers, *chains.values()]) + others / self.workers

    @property
    def training_work(self) -> float:
        """Seconds of all heads and routers in one thread."""
        kinds = self.step_seconds.items()
        return sum(step * (self._chain_steps(kind) + self.heads[kind] * self.router_steps) for kind, step in kinds)

    def _chain_steps(self, kind: str) -> int:
        return 0 if kind == "identity" else self.steps + (self.heads[kind] - 1) * self.steps_from_neighbour

    def __str__(self) -> str:
        times = ", ".join(f"{kind} {seconds * 1e3:.0f} ms" for kind, seconds in self.step_seconds.items())
        text = f"{self.steps} steps for the deepest head of a kind, {self.steps_from_neighbour} for the others ({times} a step)"
        dropped = [kind for kind in self.heads if kind not in self.step_seconds]
        without = f"; no time for {', '.join(dropped)}: give more --minutes" if dropped else ""
        return f"{text}: about {self.seconds:.0f} s with routers and traces, of {self.budget:.0f} s{without}"


def plan_training(step_seconds: Mapping[str, float], heads: Mapping[str, int], minutes: float, workers: int) -> TrainingPlan:
    """The most steps that fit; where the fewest do not, fewer kinds, those with the most layers of their own first.

    Heads with more layers agree more often (SmolLM2 after 20 of 30 layers: linear 22%, tail:2 29%, block:2 52%), more than the
    same time spent on more steps of a smaller head gains. More steps than the default need more minutes than the default.

    Args:
        step_seconds: kind → seconds of a training step in one thread.
        heads: kind → number of heads.
    """

    def plan(level: float, kinds: Iterable[str]) -> TrainingPlan:
        chosen = {kind: step_seconds[kind] for kind in heads if kind in kinds}
        return TrainingPlan(level, chosen, heads, minutes * 60 * _SHARE, workers)

    most = max(1.0, minutes / CalibrationConfig.minutes)
    for level in _LEVELS:
        if level <= most and (whole := plan(level, heads)).seconds <= whole.budget:
            return whole
    least, kept = _LEVELS[-1], list[str]()
    for kind in sorted(heads, key=lambda kind: -parse_kind(kind)[1]):
        if plan(least, [*kept, kind]).seconds <= minutes * 60 * _SHARE:
            kept.append(kind)
    return plan(least, kept or [min(heads, key=lambda kind: step_seconds[kind])])
