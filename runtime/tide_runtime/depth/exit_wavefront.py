"""``exit`` for looped models, loops as rows: a token is final after the first loop whose exit clears its threshold.

Its row is free at once: the next token starts its first loop in the next launch, whatever loops other sequences are at. What a
token that has not stopped would choose is a guess of the next one, as in `wavefront`. So the text is the one that `ExitDepth`
gives where it evaluates exits for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import numpy as np

from tide_runtime.backends.base import LoopContext
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.exits import bundle_exits
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.executor import head_score, passes_mlp
from tide_runtime.depth.frontier import Frontier
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.speculation.record import TrackRecord
from tide_runtime.depth.stops import ANY_SCORE, adds_up, check_budget, is_over_budget, least_of_sum, stops_of
from tide_runtime.depth.wavefront import Choice, Guessed, Ran, Row, WavefrontDepth, WavefrontSequence
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


@dataclass
class ExitWavefrontSequence(WavefrontSequence):
    """A sequence whose tokens may stop.

    Args:
        stopped: share of the tokens that stopped after each loop, the latest counting most.
        staying: the text's place → of the token before it, the probability of the model's gate that it left no loop so far.
    """

    stopped: list[float] = field(kw_only=True)
    staying: dict[int, float] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """None under a depth budget: where a token stops depends on the depths of all before it."""
        return super().room if self.sequence.params.depth_budget is None else 0


class ExitWavefront(WavefrontDepth):
    """Runs rows of all loops at once, each token up to the first exit that lets it go; see the module."""

    name = "exit"
    runs_every_layer = False

    def __init__(self, manifest: Manifest, options: DepthOptions, costs: CostTable | None = None) -> None:
        super().__init__(manifest, options, costs)
        self.options = options
        self.adds_up = adds_up(options)
        self.stops = {stop.exit.layers * self.loops // self.num_layers: stop for stop in stops_of(manifest, options)}
        self.stopping_loops = {*self.stops, self.loops}
        self.max_waiting = self.lookahead + options.tuning.exit_room
        known = manifest.calibration.exit_depths if manifest.calibration is not None and options.threshold is None else {}
        self._shares = [known.get(str((loop + 1) * self.num_layers // self.loops), 0.0) for loop in range(self.loops)]

    def check_params(self, params: GenerationParams) -> None:
        check_budget(params, [*self.stops.values()], self.options, self.num_layers)

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        state = cast("ExitWavefrontSequence | None", sequence.policy_state)
        if state is None or state.refills != sequence.history.refills:
            return sequence.num_cached_tokens
        return min(sequence.num_cached_tokens, state.frontier.done[-1])

    def _start(self, sequence: TokenSequence, frontier: Frontier, settled: list[float]) -> WavefrontSequence:
        stopped = self._shares if any(self._shares) else [0.0] * (self.loops - 1) + [1.0]
        return ExitWavefrontSequence(sequence, frontier, settled=settled, stopped=stopped, record=TrackRecord(self.tuning))

    def _score(self, context: LoopContext, rows: Sequence[Row], ran: Sequence[Ran]) -> list[list[float]]:
        scores = super()._score(context, rows, ran)
        for loop, stop in self.stops.items():
            mine = [i for i, row in enumerate(rows) if row.number % self.loops + 1 == loop and row.num_logits]
            if stop.exit.graph is None or not mine:
                continue
            states = np.concatenate([ran[i].states[-rows[i].num_logits :] for i in mine])
            judged = context.step(0, [len(states)])
            judged.hidden[stop.exit.boundary - 1][: len(states)] = states
            judged.run(stop.exit.graph)
            found = iter(judged.score[: len(states)].tolist())
            for i in mine:
                scores[i] = [*islice(found, rows[i].num_logits)]
        return scores

    def _is_final(self, state: WavefrontSequence, place: int, choice: Choice, score: float) -> bool:
        assert isinstance(state, ExitWavefrontSequence)
        stop = self.stops.get(choice.loop)
        if choice.loop == self.loops or stop is None:
            return choice.loop == self.loops
        info = stop.exit.info
        staying = state.staying.get(place, 1.0) if choice.loop > min(self.stops) else 1.0
        threshold = least_of_sum(stop, staying) if self.adds_up else stop.threshold
        min_score = ANY_SCORE if is_over_budget(state.sequence, self.num_layers) else threshold
        stops = passes_mlp(info, score, min_score)
        if stops:
            score = head_score(info, score, choice.logits, choice.argmax)
            stops = score >= min_score
        state.staying[place] = staying * (1 - score)
        state.sequence.depth.forced += stops and score < threshold
        return stops

    def _record(self, state: WavefrontSequence, choice: Choice, guessed: Guessed | None, right: bool) -> None:
        assert isinstance(state, ExitWavefrontSequence)
        state.staying.pop(state.sequence.num_cached_tokens + 1, None)
        rate = self.tuning.settled_rate
        depth = state.sequence.depth
        state.stopped = [(1 - rate) * share + rate * (loop == choice.loop) for loop, share in enumerate(state.stopped, 1)]
        depth.token_depths.append(choice.loop * self.num_layers // self.loops)
        depth.deep_passes += choice.loop == self.loops
        if guessed is not None:
            depth.drafted[guessed.source] += 1
            depth.accepted[guessed.source] += right

    def _launches_and_rows(self, states: Sequence[WavefrontSequence], after: int) -> tuple[float, float]:
        settled, stopped = (
            [sum(shares) / len(states) for shares in zip(*lists, strict=True)]
            for lists in zip(*((state.settled, cast(ExitWavefrontSequence, state).stopped) for state in states), strict=True)
        )
        launches = sum(
            share * of * min(stop, max(loop, after))
            for stop, of in enumerate(stopped, 1)
            if of
            for loop, share in enumerate(settled, 1)
        )
        return launches, self.loops / launches  # all loops run in the end


def takes_rows(manifest: Manifest, options: DepthOptions) -> bool:
    """Whether `ExitWavefront` can do what ``options`` want with the exits of the bundle: those at the ends of loops with the
    model's own head, and no package's router of its logits."""
    each = manifest.model.num_layers // manifest.model.loops
    exits = bundle_exits(manifest)
    at_ends = all(e.info.head == "identity" and e.info.checkpoint % each == 0 and e.score_graph is None for e in exits)
    return at_ends and not options.max_exit_streak
