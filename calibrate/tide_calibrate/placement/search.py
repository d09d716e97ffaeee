"""Where to cut and when to stop drafting: checkpoints, heads, routers, thresholds and draft limit that make ``exact`` fastest.

Dynamic programming (`exit_chain`) proposes; the simulation (`simulate`), which plays whole cycles, judges and polishes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tide_runtime.bundle.calibration import ROUTERS, CostTable, ExitInfo, cuts
from tide_runtime.costs.cost_model import StepCurve
from tide_runtime.errors import ParamsError

from tide_calibrate.placement.candidates import ExitOption, exit_options, exit_speedup, score_thresholds
from tide_calibrate.placement.dynamic_program import best_chains, chain_costs
from tide_calibrate.simulation.exact import Drafter, simulate_exact
from tide_calibrate.simulation.exit import simulate_exit, simulate_full
from tide_calibrate.simulation.replay import PolicySimulation, windows
from tide_calibrate.traces.trace import SplitTrace

GATE = 1.02  # least predicted speedup for which leaving `full` is recommended
CLOSE = 0.99  # of the fastest `exact`: among exits that come so close, policy `exit` has a say
WORTH = 1.01  # what each further threshold has to gain: less, on so few tokens, is luck
SEARCH_TOKENS = 4000  # simulated while searching
WRONG_SHARES = (0.1, 0.3, 0.6)  # tried prices of a wrong draft, in steps of the whole model
PROPOSALS, FINALISTS = 4, 8  # chains taken from one run of dynamic programming; chains polished
LIMITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
SCREENED_LIMITS = (1, 2, 4, 8)
FINE_SHARES = tuple(np.arange(0.02, 0.96, 0.06).tolist())
NEVER_AGREES = "the layers never agree early enough for an exit to gain anything, even if its router were always right"

Structure = tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class Placement:
    """Exits for a model, and what they are predicted to gain.

    Args:
        num_layers: L.
        exits: shallow first; empty when ``exact`` would gain nothing from their drafts.
        draft_limit: for policy ``exact``.
        recommended: ``exact``, or ``full`` when nothing is predicted to reach 1.02x.
        simulations: what was run → what it did on the trace: ``full``; ``exact`` as the runtime runs it by default, with both
            drafters; ``exact:ngram`` and ``exact:router`` with one of them; ``exit`` where a threshold is certified. On a trace
            without texts ``exact`` is that with the router alone.
        reason: why there are no exits; empty when there are.
    """

    num_layers: int
    exits: list[ExitInfo]
    draft_limit: int
    recommended: str
    simulations: dict[str, PolicySimulation]
    reason: str = ""

    @property
    def checkpoints(self) -> list[int]:
        """Every place where the model must be cut: the exits' checkpoints and the beginnings of their tails."""
        return cuts(self.exits, self.num_layers)

    @property
    def predicted(self) -> dict[str, float]:
        """Policy → modelled speedup over the uncut model, one row, greedy."""
        return {name: simulation.speedup for name, simulation in self.simulations.items()}

    @property
    def exact_speedup(self) -> float:
        """Of ``exact`` with the drafters that suit it best; 0 when nothing drafts."""
        return max((gain for name, gain in self.predicted.items() if name.startswith("exact")), default=0.0)


def choose_exits(
    trace: SplitTrace, costs: CostTable, router: str = "auto", most_exits: int = 3, max_disagreement: float = 0.01
) -> Placement:
    """Choose exits and draft limit for ``exact`` on ``trace``; their ``exit_threshold`` is left to the certificate.

    Where several make ``exact`` about as fast, a percent of ``exit``'s speed counts as much as one of its own, and each further
    threshold, of another exit or of an MLP in front of the probability, costs one.

    Args:
        trace: text like what will be generated, best the model's own greedy output.
        costs: of the machine that will generate; one row.
        router: ``auto``, ``max_probability``, ``mlp`` or ``mlp+max_probability``.
        most_exits: checkpoints at most; 1 or more.
        max_disagreement: what policy ``exit`` will be allowed.

    Deterministic. Raises CalibrationError when the table lacks sizes or the trace has no tokens, ParamsError for options.
    """
    if router not in ("auto", *ROUTERS):
        raise ParamsError(f"router is {router!r}; set it to one of: auto, {', '.join(ROUTERS)}")
    if most_exits < 1:
        raise ParamsError(f"most_exits is {most_exits}; set it to an integer >= 1")
    sample = sample_windows(trace, SEARCH_TOKENS)
    search = _Search(sample, costs, _draft_limits(costs), max_disagreement)
    if not search.anything_to_gain():
        return replace(predict(trace, costs, [], 0), reason=NEVER_AGREES)
    best = search.best(router, most_exits)
    return only_if_they_pay(trace, costs, best.exits, best.limit)


def only_if_they_pay(trace: SplitTrace, costs: CostTable, exits: Sequence[ExitInfo], draft_limit: int) -> Placement:
    """A placement of ``exits``, or of none when ``exact`` is not predicted to reach 1.02x on ``trace`` with their drafts alone.

    Alone, because a model's greedy output repeats itself more than most text that is generated: copies are flattered here.
    """
    alone = simulate_exact(trace, exits, costs, draft_limit).speedup
    if alone >= GATE:
        return predict(trace, costs, exits, draft_limit)
    reason = f"the drafts of the best exits found are predicted to make exact {alone:.2f}x, and under {GATE:.2f}x no cut pays"
    return replace(predict(trace, costs, [], 0), reason=reason)


def predict(trace: SplitTrace, costs: CostTable, exits: Sequence[ExitInfo], draft_limit: int) -> Placement:
    """Simulate every policy that ``exits`` allow on ``trace``, and recommend one; ``exit`` where a threshold is certified."""
    simulations = {"full": simulate_full(trace, costs)}
    simulations |= {name: simulate_exact(trace, exits, costs, draft_limit, draft) for name, draft in _drafters(trace, exits)}
    if any(exit.exit_threshold is not None for exit in exits):
        simulations["exit"] = simulate_exit(trace, exits, costs)
    placement = Placement(trace.num_layers, list(exits), draft_limit, "full", simulations)
    return replace(placement, recommended="exact") if placement.exact_speedup >= GATE else placement


def _drafters(trace: SplitTrace, exits: Sequence[ExitInfo]) -> list[tuple[str, Drafter]]:
    """What to call, and how to draft in, each simulation of ``exact`` that there is something to draft with."""
    if not trace.texts:
        return [("exact", "router")] if exits else []
    alone: list[tuple[str, Drafter]] = [("exact:router", "router")] if exits else []
    return [("exact", "both"), ("exact:ngram", "ngram"), *alone]


def sample_windows(trace: SplitTrace, tokens: int) -> SplitTrace:
    """Whole windows, evenly spread over ``trace``, of about ``tokens`` tokens in all."""
    spans = windows(trace)
    count = max(1, round(len(spans) * min(1.0, tokens / len(trace.window))))
    chosen = [spans[i] for i in np.linspace(0, len(spans) - 1, count).round().astype(int)]
    return trace.select(np.concatenate([np.arange(*span) for span in chosen]))


@dataclass(frozen=True)
class _Found:
    speedup: float
    exits: list[ExitInfo]
    limit: int

    @property
    def thresholds(self) -> int:
        """How many were fitted."""
        return len(self.exits) + sum(exit.mlp_threshold is not None for exit in self.exits)


@dataclass(frozen=True)
class _Search:
    """Candidates on a sample of the trace."""

    trace: SplitTrace
    costs: CostTable
    limits: list[int]
    max_disagreement: float

    def anything_to_gain(self) -> bool:
        """Whether a router that is always right would gain anywhere, were every early guess free but for its head."""
        times, layers = StepCurve.of(self.costs, 1), self.trace.num_layers
        for (checkpoint, _), exit in self.trace.exits.items():
            deep = 1 - float(exit.agrees.mean())
            share = float(times.table.warm_shares(checkpoint, layers).min())
            shallow = share * (times.segments(1, checkpoint)[1] + times.head_ms[1]) + times.evaluation_host_ms
            ms = shallow + deep * (times.segments(1, layers - checkpoint)[1] + times.verification_host_ms)
            if self.costs.unsplit_ms / ms >= GATE:
                return True
        return False

    def best(self, router: str, most_exits: int) -> _Found:
        screening = [limit for limit in self.limits if limit in SCREENED_LIMITS]
        screened = [self._best_limit(exits, screening) for exits in self._proposals(router, most_exits)]
        finalists = sorted(screened, key=lambda found: -found.speedup)[:FINALISTS]
        # The best of each number of thresholds always competes: policy `exit` may prefer it.
        finalists += [found for found in _best_of_each_size(screened) if found not in finalists]
        polished = _best_of_each_size([self._polish(found) for found in finalists])
        least = CLOSE * max(found.speedup for found in polished)
        close = [found for found in polished if found.speedup >= least]
        return max(close, key=lambda found: found.speedup * self._exit_speedup(found) / WORTH**found.thresholds)

    def _exit_speedup(self, found: _Found) -> float:
        return exit_speedup(self.trace, found.exits, self.costs, self.max_disagreement)

    def _proposals(self, router: str, most_exits: int) -> list[list[ExitInfo]]:
        """The best chain of each kind, in the order in which dynamic programming ranks them, for several prices of a draft."""
        times = StepCurve.of(self.costs, int(max(step.seq for step in self.costs.steps)))
        options = exit_options(self.trace, times, router)
        proposals: dict[Structure, list[ExitInfo]] = {}
        for tail in sorted({option.info.tail_layers for option in options}):
            # All exits run the same tail, or none does (CalibrationInfo): its keys and values have no gaps then.
            fitting = [option for option in options if option.info.tail_layers == tail]
            for length, share in itertools.product(range(1, most_exits + 1), WRONG_SHARES):
                new = (exits for exits in self._chains(fitting, times, length, share) if _structure(exits) not in proposals)
                proposals |= {_structure(exits): exits for exits in itertools.islice(new, PROPOSALS)}
        return list(proposals.values())

    def _chains(self, options: list[ExitOption], times: StepCurve, length: int, share: float) -> Iterator[list[ExitInfo]]:
        """The best chain of each structure, cheapest first."""
        seen: set[Structure] = set()
        for chain in best_chains(chain_costs(options, self.trace.num_layers, times, share * self.costs.unsplit_ms), length):
            exits = [options[o].info for o in chain.options]
            if _structure(exits) not in seen:
                seen.add(_structure(exits))
                yield exits

    def _best_limit(self, exits: list[ExitInfo], limits: Sequence[int]) -> _Found:
        return max((self._found(exits, limit) for limit in limits), key=lambda found: found.speedup)

    def _polish(self, found: _Found) -> _Found:
        """Coordinate ascent over each exit's thresholds and the draft limit."""
        for _ in range(3):
            before = found
            for index in range(len(found.exits)):
                tried = (self._found(exits, found.limit) for exits in self._variants(found.exits, index))
                found = max((found, *tried), key=lambda one: one.speedup)
            found = max(found, self._best_limit(found.exits, self.limits), key=lambda one: one.speedup)
            if found is before:
                break
        return found

    def _variants(self, exits: list[ExitInfo], index: int) -> Iterator[list[ExitInfo]]:
        info = exits[index]
        traced = self.trace.exits[info.checkpoint, info.head]
        for threshold in score_thresholds(traced.scores[info.router.split("+")[-1]], FINE_SHARES):
            yield [*exits[:index], replace(info, exact_threshold=threshold), *exits[index + 1 :]]
        if info.mlp_threshold is not None:
            for threshold in score_thresholds(traced.scores["mlp"], FINE_SHARES):
                yield [*exits[:index], replace(info, mlp_threshold=threshold), *exits[index + 1 :]]

    def _found(self, exits: list[ExitInfo], limit: int) -> _Found:
        return _Found(simulate_exact(self.trace, exits, self.costs, limit).speedup, exits, limit)


def _best_of_each_size(found: Sequence[_Found]) -> list[_Found]:
    """The fastest of each number of exits and thresholds, few first."""
    best: dict[tuple[int, int], _Found] = {}
    for one in sorted(found, key=lambda one: (len(one.exits), one.thresholds, -one.speedup)):
        best.setdefault((len(one.exits), one.thresholds), one)
    return list(best.values())


def _structure(exits: Sequence[ExitInfo]) -> Structure:
    return tuple((exit.checkpoint, exit.head, exit.router) for exit in exits)


def _draft_limits(costs: CostTable) -> list[int]:
    """Limits whose batch of drafts and last token was measured."""
    largest = max((step.seq for step in costs.steps if step.rows == 1), default=0)
    return [limit for limit in LIMITS if limit < largest] or [1]
