"""Choose checkpoints, heads, routers, thresholds and the draft limit that maximise the simulated speed of policy ``exact``.

Every exit alone is ranked by a price in closed form (`placement.candidates`). The simulation (`simulation.exact`), which models
whole draft–verify cycles, decides among the best and refines their thresholds. Further exits are added one by one, each of those
that were best alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tide_runtime.bundle.calibration import ROUTERS, CostTable, ExitInfo, cuts
from tide_runtime.costs.cost_model import DEPTH_TURN, Launch
from tide_runtime.errors import CalibrationError, ParamsError

from tide_calibrate.placement.candidates import exit_options, exit_speedup, score_thresholds
from tide_calibrate.simulation.exact import Drafter, simulate_exact
from tide_calibrate.simulation.exit import simulate_exit, simulate_full
from tide_calibrate.simulation.replay import PolicySimulation, cut_model, windows
from tide_calibrate.traces.trace import SplitTrace

GATE = 1.02  # least predicted speedup for which leaving `full` is recommended
CLOSE = 0.99  # placements at least this close to the fastest `exact` are ranked by the speed of `exit` as well
WORTH = 1.01  # gain required of each further threshold; a smaller one is noise on so few tokens
SEARCH_TOKENS = 4000  # simulated during the search
WRONG_SHARES = (0.1, 0.3, 0.6)  # prices of a wrong draft to try, in full steps
PROPOSALS, FINALISTS = 6, 6  # kinds of exits simulated for each price of a wrong draft; candidates refined
LIMITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
SCREENED_LIMITS = (1, 2, 4, 8)
FINE_SHARES = tuple(np.arange(0.02, 0.96, 0.06).tolist())
NEVER_AGREES = "the layers never agree early enough for an exit to gain anything, even if its router were always right"


@dataclass(frozen=True)
class Placement:
    """Exits of a model and the simulation of every policy with them.

    Args:
        num_layers: L.
        exits: shallow first; empty when their drafts are not predicted to pay off.
        draft_limit: maximum number of drafts of policy ``exact``.
        recommended: ``exact``, or ``full`` when no policy is predicted to reach 1.02x.
        simulations: simulated policies: ``full``; ``exact``, the runtime's default with both drafters; ``exact:ngram`` and
            ``exact:router`` with one of them; ``exit`` if a threshold is certified. On a trace without texts, ``exact`` drafts
            with the router alone.
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
        """Layers after which the model is cut: the exits' checkpoints and the beginnings of their tails."""
        return cuts(self.exits, self.num_layers)

    @property
    def predicted(self) -> dict[str, float]:
        """Policy → modelled speedup over the uncut model, for one sequence, greedy."""
        return {name: simulation.speedup for name, simulation in self.simulations.items()}

    @property
    def exact_speedup(self) -> float:
        """Speedup of ``exact`` with the best choice of drafters; 0 when it has no drafter."""
        return max((gain for name, gain in self.predicted.items() if name.startswith("exact")), default=0.0)


def choose_exits(
    trace: SplitTrace, costs: CostTable, router: str = "auto", most_exits: int = 3, max_disagreement: float = 0.01
) -> Placement:
    """Choose exits and draft limit for ``exact`` on ``trace``; their ``exit_threshold`` is chosen by the certificate.

    Among placements whose ``exact`` is within a percent of the fastest, the product of the speedups of ``exact`` and ``exit``
    decides, divided by 1.01 per fitted threshold (one per exit, one more for an MLP in front of the probability).

    Args:
        trace: text like the text to be generated, ideally the model's own greedy output.
        costs: step costs of the target machine, for one sequence.
        router: ``auto``, ``max_probability``, ``mlp`` or ``mlp+max_probability``.
        most_exits: maximum number of checkpoints; 1 or more.
        max_disagreement: ε of policy ``exit``.

    The choice is deterministic. Raises CalibrationError when the table lacks sizes or the trace has no tokens, ParamsError for
    unknown or out-of-range options.
    """
    if router not in ("auto", *ROUTERS):
        raise ParamsError(f"router is {router!r}; set it to one of: auto, {', '.join(ROUTERS)}")
    if most_exits < 1:
        raise ParamsError(f"most_exits is {most_exits}; set it to an integer >= 1")
    sample = sample_windows(trace, SEARCH_TOKENS)
    search = _Search(sample, costs, _draft_limits(costs), max_disagreement)
    if not search.oracle_pays():
        return replace(predict(trace, costs, [], 0), reason=NEVER_AGREES)
    best = search.best(router, most_exits)
    return gate_exits(trace, costs, best.exits, best.limit)


def gate_exits(trace: SplitTrace, costs: CostTable, exits: Sequence[ExitInfo], draft_limit: int) -> Placement:
    """A placement of ``exits``, or of none when ``exact`` is not predicted to reach 1.02x on ``trace`` with their drafts alone.

    Prompt-lookup drafts are excluded: greedy output repeats itself more than most generated text, so their gain is overestimated.
    """
    speedup = simulate_exact(trace, exits, costs, draft_limit).speedup
    if speedup >= GATE:
        return predict(trace, costs, exits, draft_limit)
    reason = f"the drafts of the best exits found are predicted to make exact {speedup:.2f}x, and under {GATE:.2f}x no cut pays"
    return replace(predict(trace, costs, [], 0), reason=reason)


def predict(trace: SplitTrace, costs: CostTable, exits: Sequence[ExitInfo], draft_limit: int) -> Placement:
    """Simulate every policy with ``exits`` on ``trace`` and recommend one; ``exit`` only if a threshold is certified."""
    simulations = {"full": simulate_full(trace, costs)}
    simulations |= {name: simulate_exact(trace, exits, costs, draft_limit, draft) for name, draft in _drafters(trace, exits)}
    if any(info.exit_threshold is not None for info in exits):
        simulations["exit"] = simulate_exit(trace, exits, costs)
    placement = Placement(trace.num_layers, list(exits), draft_limit, "full", simulations)
    return replace(placement, recommended="exact") if placement.exact_speedup >= GATE else placement


def _drafters(trace: SplitTrace, exits: Sequence[ExitInfo]) -> list[tuple[str, Drafter]]:
    """Names and drafters of the simulations of ``exact`` that are possible with ``exits`` on ``trace``."""
    if not trace.texts:
        return [("exact", "router")] if exits else []
    router_only: list[tuple[str, Drafter]] = [("exact:router", "router")] if exits else []
    return [("exact", "all"), ("exact:ngram", "ngram"), *router_only]


def sample_windows(trace: SplitTrace, tokens: int) -> SplitTrace:
    """Restrict ``trace`` to evenly spread whole windows with about ``tokens`` tokens in total."""
    spans = windows(trace)
    count = max(1, round(len(spans) * min(1.0, tokens / len(trace.window))))
    chosen = [spans[i] for i in np.linspace(0, len(spans) - 1, count).round().astype(int)]
    return trace.select(np.concatenate([np.arange(*span) for span in chosen]))


@dataclass(frozen=True)
class _Candidate:
    """Exits and a draft limit, with their simulated speedup of ``exact``."""

    speedup: float
    exits: list[ExitInfo]
    limit: int

    @property
    def num_thresholds(self) -> int:
        """Number of fitted thresholds."""
        return len(self.exits) + sum(info.mlp_threshold is not None for info in self.exits)


@dataclass(frozen=True)
class _Search:
    """Search on a sample of the trace."""

    trace: SplitTrace
    costs: CostTable
    limits: list[int]
    max_disagreement: float

    def oracle_pays(self) -> bool:
        """Return whether any exit with an oracle router reaches the gate, if drafting costs only the prefix and the head."""
        for (checkpoint, _), traced in self.trace.exits.items():
            info = ExitInfo(checkpoint, "identity", "max_probability", 0.0)
            model, (early_exit,) = cut_model([info], self.trace.num_layers, self.costs)
            deep = model.price([model.run(early_exit.boundary, model.num_segments), Launch(DEPTH_TURN)])
            ms = model.evaluation(1, 0, early_exit) + (1 - float(traced.agrees.mean())) * deep
            if self.costs.unsplit_ms / ms >= GATE:
                return True
        return False

    def best(self, router: str, most_exits: int) -> _Candidate:
        """Screen proposals with a few draft limits, refine the finalists, and rank the fastest by both policies.

        Exits are added as long as the fastest placement becomes faster.
        """
        alone = [self._screen([info]) for info in self._proposals(router)]
        refined = fastest = self._refine_finalists(alone)
        for _ in range(most_exits - 1):
            larger = self._refine_finalists([self._screen(exits) for exits in self._with_another(fastest, alone)])
            refined = [*refined, *larger]
            if _highest_speedup(larger) <= _highest_speedup(fastest):
                break
            fastest = larger
        close = [candidate for candidate in refined if candidate.speedup >= CLOSE * _highest_speedup(refined)]
        return max(close, key=lambda one: one.speedup * self._exit_speedup(one) / WORTH**one.num_thresholds)

    def _screen(self, exits: list[ExitInfo]) -> _Candidate:
        return self._best_limit(exits, [limit for limit in self.limits if limit in SCREENED_LIMITS])

    def _refine_finalists(self, screened: Sequence[_Candidate]) -> list[_Candidate]:
        finalists = sorted(screened, key=lambda candidate: -candidate.speedup)[:FINALISTS]
        # The best of each number of thresholds is always a finalist, because policy `exit` may be fastest with it.
        finalists += [candidate for candidate in _best_of_each_size(screened) if candidate not in finalists]
        return _best_of_each_size([self._refine(candidate) for candidate in finalists])

    def _exit_speedup(self, candidate: _Candidate) -> float:
        return exit_speedup(self.trace, candidate.exits, self.costs, self.max_disagreement)

    def _proposals(self, router: str) -> list[ExitInfo]:
        """The cheapest exit of each kind (checkpoint, head, router) for several prices of a wrong draft, `PROPOSALS` for each."""
        options, proposals = exit_options(self.trace, self.costs, router), list[ExitInfo]()
        for share in WRONG_SHARES:
            price = share * self.costs.unsplit_ms
            cheapest: dict[tuple[int, str, str], ExitInfo] = {}
            for option in sorted(options, key=lambda option: option.ms + option.wrong * price):
                cheapest.setdefault((option.info.checkpoint, option.info.head, option.info.router), option.info)
            proposals += [info for info in list(cheapest.values())[:PROPOSALS] if info not in proposals]
        return proposals

    @staticmethod
    def _with_another(found: Sequence[_Candidate], alone: Sequence[_Candidate]) -> list[list[ExitInfo]]:
        """The exits of each candidate with one more, at another checkpoint.

        All exits share one tail length (CalibrationInfo), so that the KV cache of the tail's layers has no gaps.
        """
        larger = list[list[ExitInfo]]()
        for candidate, (info,) in itertools.product(found, [one.exits for one in alone]):
            taken = {exit.checkpoint for exit in candidate.exits}
            if info.checkpoint not in taken and info.tail_layers == candidate.exits[0].tail_layers:
                larger.append(sorted([*candidate.exits, info], key=lambda exit: exit.checkpoint))
        return larger

    def _best_limit(self, exits: list[ExitInfo], limits: Sequence[int]) -> _Candidate:
        return max((self._simulate(exits, limit) for limit in limits), key=lambda candidate: candidate.speedup)

    def _refine(self, best: _Candidate) -> _Candidate:
        """Coordinate ascent over each exit's thresholds and the draft limit."""
        for _ in range(3):
            before = best
            for index in range(len(best.exits)):
                tried = (self._simulate(exits, best.limit) for exits in self._variants(best.exits, index))
                best = max((best, *tried), key=lambda candidate: candidate.speedup)
            best = max(best, self._best_limit(best.exits, self.limits), key=lambda candidate: candidate.speedup)
            if best is before:
                break
        return best

    def _variants(self, exits: list[ExitInfo], index: int) -> Iterator[list[ExitInfo]]:
        """Yield ``exits`` with another threshold, or another MLP threshold, at ``index``."""
        info = exits[index]
        traced = self.trace.exits[info.checkpoint, info.head]
        for threshold in score_thresholds(traced.scores[info.router.split("+")[-1]], FINE_SHARES):
            yield [*exits[:index], replace(info, exact_threshold=threshold), *exits[index + 1 :]]
        if info.mlp_threshold is not None:
            for threshold in score_thresholds(traced.scores["mlp"], FINE_SHARES):
                yield [*exits[:index], replace(info, mlp_threshold=threshold), *exits[index + 1 :]]

    def _simulate(self, exits: list[ExitInfo], limit: int) -> _Candidate:
        return _Candidate(simulate_exact(self.trace, exits, self.costs, limit).speedup, exits, limit)


def _highest_speedup(candidates: Sequence[_Candidate]) -> float:
    return max((candidate.speedup for candidate in candidates), default=0.0)


def _best_of_each_size(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The fastest candidate of each number of exits and thresholds, smallest numbers first."""
    best: dict[tuple[int, int], _Candidate] = {}
    for candidate in sorted(candidates, key=lambda one: (len(one.exits), one.num_thresholds, -one.speedup)):
        best.setdefault((len(candidate.exits), candidate.num_thresholds), candidate)
    return list(best.values())


def _draft_limits(costs: CostTable) -> list[int]:
    """Draft limits whose verification batch (the drafts and one token) is within the measured sizes.

    Raises CalibrationError unless one sequence was measured at one token and at a larger size.
    """
    sizes = sorted(step.seq for step in costs.steps if step.rows == 1)
    if len(sizes) < 2 or sizes[0] != 1:
        raise CalibrationError(
            f"the cost table has one sequence measured at {sizes} tokens; "
            "it needs 1 and at least one larger size: measure again with seqs={1: (1, 2, 4, 8, 16)}"
        )
    return [limit for limit in LIMITS if limit < sizes[-1]] or [1]
