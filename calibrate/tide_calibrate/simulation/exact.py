"""The policy ``exact``, played through on a text of which it is known what every exit would have said.

Draft from the shallow segments while the router is confident (at most ``draft_limit`` drafts, fewer in a text's first cycles:
`next_exit_drafts`), then run the rest for all m waiting tokens at once. Gained: the drafts up to the first wrong one, and
one token more. Speculative decoding (Leviathan et al. 2023) with the model's own first layers as drafter (LayerSkip, Elhoushi et
al. 2024). Where the text repeats, drafts are copied from it instead (`ngram`), and one pass takes them through the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import CostTable, ExitInfo
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.speculation.record import next_exit_drafts
from tide_runtime.depth.speculation.successors import SuccessorTable
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.errors import CalibrationError, ParamsError

from tide_calibrate.simulation.replay import LaunchCounts, Playback, PolicySimulation, windows
from tide_calibrate.simulation.text_drafts import TUNING, TextDrafts
from tide_calibrate.traces.trace import SplitTrace

Drafter = Literal["router", "ngram", "all"]


def simulate_exact(
    trace: SplitTrace,
    exits: Sequence[ExitInfo],
    costs: CostTable,
    draft_limit: int,
    draft: Drafter = "router",
    tuning: DepthTuning = TUNING,
) -> PolicySimulation:
    """Policy ``exact`` with the exits' ``exact_threshold``, greedy, one sequence after the other: outputs draft for later ones.

    Args:
        draft: ``ngram`` never evaluates the exits, but the model is cut for them; ``all`` looks up where the runtime would.
        tuning: the runtime's constants.

    Raises ParamsError for options that do not exist, CalibrationError when trace and exits do not fit together, or texts to
    copy from are missing.
    """
    _check(trace, draft_limit, draft)
    lookups = None if draft == "router" else _text_drafts(trace, exits, costs, draft_limit, draft, tuning)
    rest = not exits or draft == "ngram" or (lookups is not None and lookups.gain < 1)  # exits that lose are not evaluated
    limit = 0 if rest else draft_limit
    most = max(limit, tuning.text_draft_limit if lookups else 0) + 1
    run = Playback.prepare(trace, exits, [exit.exact_threshold for exit in exits], costs, most)
    drafts = accepted = 0
    table = SuccessorTable(tuning.successor_entries)
    for start, end in windows(trace):
        lookup = lookups.lookup(trace, start, table) if lookups is not None else None
        made, right = _Generation(run, start, end, limit, lookup, tuning).play()
        drafts, accepted = drafts + made, accepted + right
    return run.result("exact", costs, acceptance=accepted / drafts if drafts else None, disagreement=0.0)


@dataclass(frozen=True)
class _TextDrafts:
    """What the text drafts of every window are made with; see `TextDrafts`."""

    pass_ms: NDArray[np.float64]
    gain: float
    tuning: DepthTuning

    def lookup(self, trace: SplitTrace, start: int, table: SuccessorTable) -> TextDrafts:
        return TextDrafts(trace.texts[int(trace.window[start])], self.pass_ms, max(1.0, self.gain), self.tuning, table)


def _check(trace: SplitTrace, draft_limit: int, draft: str) -> None:
    if draft_limit < 0:
        raise ParamsError(f"draft_limit is {draft_limit}; set it to an integer >= 0")
    if draft not in get_args(Drafter):
        raise ParamsError(f"draft is {draft!r}; set it to one of: {', '.join(get_args(Drafter))}")
    if draft != "router" and not set(np.unique(trace.window).tolist()) <= set(trace.texts):
        raise CalibrationError("the trace has no texts to copy from; trace the model's own continuations")


def _text_drafts(
    trace: SplitTrace, exits: Sequence[ExitInfo], costs: CostTable, draft_limit: int, draft: str, tuning: DepthTuning
) -> _TextDrafts:
    model = CostModel(costs, [0, trace.num_layers])
    pass_ms = np.array([0.0, *(model.full(1, tokens, tokens) for tokens in range(1, tuning.text_draft_limit + 2))])
    if draft == "ngram" or not exits:
        return _TextDrafts(pass_ms, 1.0, tuning)
    return _TextDrafts(pass_ms, simulate_exact(trace, exits, costs, draft_limit, tuning=tuning).speedup, tuning)


class _Generation:
    """The window [start, end) of a trace, cycle by cycle. ``lookup``: None without text drafts."""

    def __init__(
        self, run: Playback, start: int, end: int, draft_limit: int, lookup: TextDrafts | None, tuning: DepthTuning
    ) -> None:
        self.counts, self.deepest = run.counts, len(run.decisions)
        self.start, self.size, self.limit, self.lookup = start, end - start, draft_limit, lookup
        self.stops, self.num_exit_drafts = run.stops[start:end].tolist(), tuning.first_exit_drafts
        self.next_deep = _next(run.stops[start:end] == self.deepest)
        self.next_wrong = _next(~run.agrees[start:end])

    def play(self) -> tuple[int, int]:
        """Generate the window; returns drafts made and drafts accepted."""
        position = drafts = accepted = 0
        while position < self.size:
            made, right = self._look_up(position) or self._draft(position)
            if self.lookup is not None:
                self.lookup.learn(position, right + 1)
            drafts, accepted = drafts + made, accepted + right
            position += right + 1
        return drafts, accepted

    def _look_up(self, position: int) -> tuple[int, int] | None:
        """Text drafts and right ones among them; None when none are worth verifying."""
        if self.lookup is None:
            return None
        self.counts.lookups += 1
        made, right = self.lookup.draft(position)
        if not made:
            return None
        self.counts.whole[made + 1] += 1
        return made, right

    def _draft(self, position: int) -> tuple[int, int]:
        """Exits' drafts and right ones among them, and a run of the rest for all."""
        # Where so many are drafted, or at the text's end, there is no further draft: exits are not evaluated.
        last = min(position + min(self.limit, self.num_exit_drafts), self.size - 1)
        if last == position:
            self.counts.whole[1] += 1
            return 0, 0
        deep = min(self.next_deep[position], last)
        self.counts.evaluate(self.start + position, self.start + min(deep + 1, last))
        _run_cycle(self.counts, self.stops[position:deep], self.deepest)
        made, right = deep - position, min(deep, self.next_wrong[position]) - position
        self.num_exit_drafts = next_exit_drafts(self.num_exit_drafts, made, right)
        return made, right


def _run_cycle(counts: LaunchCounts, drafts: list[int], deepest: int) -> None:
    """Run drafts to where each stops, then one token to the end, and all the drafts with it."""
    tokens = len(drafts) + 1
    counts.heads[tokens] += 1
    if deepest == 1:  # the usual case, and what follows would give the same
        counts.batches[0][1] += tokens
        counts.batches[1][tokens] += 1
        return
    waiting = [0] * (deepest + 1)  # tokens at the end of each level
    for stop in (*drafts, deepest):
        counts.advance(waiting, stop)


def _next(marked: NDArray[np.bool_]) -> list[int]:
    """For each place, the first marked one from there on; the length where there is none."""
    places = np.where(marked, np.arange(len(marked)), len(marked))
    return np.minimum.accumulate(places[::-1])[::-1].tolist()
