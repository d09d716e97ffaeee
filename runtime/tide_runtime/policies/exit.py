"""``exit``: a token's output is final at the first checkpoint whose router clears its certified threshold.

Its hidden state waits there until a later token needs the keys and values of the layers it skipped (see `skipped_layers`). By
default those layers are then run for all that waits, so a deep token always attends to exact keys and values (River-LLM's
deferred KV; CALM, Schuster et al. 2022, for the thresholds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from tide_runtime.backends.base import Slots
from tide_runtime.errors import ParamsError
from tide_runtime.executor import Executor, Guess
from tide_runtime.exit_gain import ExitGate
from tide_runtime.exits import Exit
from tide_runtime.manifest import Manifest
from tide_runtime.policies.exit_refusals import check_fills, check_tails, no_exit, too_deep
from tide_runtime.policies.full import FullDepth
from tide_runtime.policies.options import DepthOptions
from tide_runtime.policies.skipped_layers import Deferred, Propagated, SkippedLayers
from tide_runtime.prefill_exit import ExitingPrefill
from tide_runtime.row import Row, note_exit_time
from tide_runtime.step_costs import StepCosts

_ROOM = 64  # most tokens that wait at one checkpoint; then the layers they skipped are settled
_ANY_SCORE = -1.0  # below every score but NaN


@dataclass(frozen=True)
class _Stop:
    """An exit that may be taken, and from which score on."""

    exit: Exit
    threshold: float


class ExitDepth:
    """Stops where a router is sure; what it skips is run when somebody needs it."""

    name = "exit"

    def __init__(self, manifest: Manifest, prefill_chunk: int, options: DepthOptions) -> None:
        self.executor, self.options = Executor(manifest), options
        self.num_layers, self.costs, self.full = (
            manifest.model.num_layers,
            StepCosts(manifest),
            FullDepth(manifest, prefill_chunk),
        )
        propagate = options.kv == "propagate"
        self.skipped: SkippedLayers = Propagated(self.executor) if propagate else Deferred(self.executor)
        stops = [_Stop(e, t) for e in self.executor.exits if (t := self._threshold(e)) is not None]
        self.stops = [stop for stop in stops if stop.exit.info.checkpoint >= options.min_depth]
        if not self.stops:
            raise ParamsError(too_deep(stops[-1].exit.info.checkpoint, options) if stops else no_exit(manifest))
        known = manifest.calibration if options.threshold is None else None  # with other thresholds shares are not known
        exits, shares = [stop.exit for stop in self.stops], known.exit_depths if known is not None else {}
        predicted = known.predicted.get("exit") if known is not None else None
        self.gate = ExitGate(self.costs, exits, {int(layers): share for layers, share in shares.items()}, propagate, predicted)
        if propagate or options.prefill_exit:
            check_fills(manifest)
        self._known_costs: dict[tuple[int, ...], float] = {}
        self.asks_always = False  # also where it does not pay
        self.exiting_prefill: ExitingPrefill | None = None
        if options.prefill_exit:
            check_tails(manifest)
            self.exiting_prefill = ExitingPrefill(self.executor, [(s.exit, s.threshold) for s in self.stops], prefill_chunk)

    def prefill(self, slots: Slots, row: Row) -> int:
        token = self.exiting_prefill.run(slots, row) if self.exiting_prefill else self.full.prefill(slots, row)
        row.frontier = self.executor.frontier(slots, row, room=_ROOM)
        return token

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        if all(row.length < row.plain_until for row in rows):
            return self._plain(slots, rows)
        budget = rows[0].params.depth_budget  # must be kept whatever that costs
        if budget is None and not self.asks_always and not self.gate.opens(rows[0].width, rows[0].params.greedy):
            return self._leave_to_full(slots, rows)
        for row in rows:
            self._catch_up(row)
        if all(row.trial.resting and row.frontier.done[-1] == row.length and not self._over_budget(row) for row in rows):
            for row in rows:
                row.plain_until = row.length + (row.trial.resting if row.params.depth_budget is None else 0)
            return self._plain(slots, rows)
        everyone, began = range(len(rows)), perf_counter()
        self._make_room(slots, rows)
        tokens: list[list[int]] = [[] for _ in rows]
        asked = [[0] * len(self.stops) for _ in rows]
        undecided, first = [i for i in everyone if self._asks(rows[i])], 0
        if undecided:  # rows that do not ask go along to the first exit: one launch for all
            first = self.stops[0].exit.boundary
            self.executor.advance(slots, rows, [i for i in everyone if not rows[i].held], 0, first)
        for number, stop in enumerate(self.stops):
            if not undecided:
                break
            if first < stop.exit.boundary:
                self.skipped.make_way(slots, rows, undecided)
                self.executor.advance(slots, rows, undecided, first, stop.exit.boundary)
            least = [_ANY_SCORE if self._over_budget(rows[i]) else stop.threshold for i in undecided]
            guesses = self.executor.ask(slots, rows, undecided, stop.exit, least)
            for i, guess, enough in zip(undecided, guesses, least, strict=True):
                asked[i][number] = 1
                if guess.logits is not None and guess.score >= enough:  # a NaN clears nothing
                    rows[i].depth.forced += guess.score < stop.threshold
                    tokens[i].append(self._take(rows[i], stop, guess))
                    self._judge(rows[i], asked[i], waited=0)
            undecided, first = [i for i in undecided if not tokens[i]], stop.exit.boundary
        note_exit_time(rows, began)
        self._go_deep(slots, rows, [i for i in everyone if not tokens[i]], tokens)
        for row in rows:
            row.length = row.frontier.done[0]
        return tokens

    def _leave_to_full(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        for row in rows:
            row.ran_full = True
            row.depth.record_plain(self.num_layers)
        return self.full.decode(slots, rows)

    def _plain(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        """Exits do not pay just now and nothing waits: a step of `full`, with little around it."""
        tokens = self.full.decode(slots, rows)
        for row in rows:
            row.depth.record_plain(self.num_layers)
        return tokens

    def _catch_up(self, row: Row) -> None:
        """With plain steps, which leave frontier and trial where they were."""
        passed = row.length - row.frontier.done[0]
        if passed:
            row.frontier.reset(row.length)
            row.trial.rest(passed)

    def _go_deep(self, slots: Slots, rows: Sequence[Row], needy: list[int], tokens: list[list[int]]) -> None:
        """Run the rest for the rows that need it: when that is most rows, or one has waited long enough."""
        if not needy:
            return
        if 2 * len(needy) < len(rows) and all(rows[i].held < self.options.max_wait_steps for i in needy):
            for i in needy:
                rows[i].held += 1
            return
        waited = [rows[i].known - rows[i].frontier.done[-1] for i in needy]
        self.skipped.make_way(slots, rows, needy)
        deep = self.executor.advance(slots, rows, needy, 0, self.executor.depth, [1] * len(needy))
        for i, last, count in zip(needy, deep, waited, strict=True):
            tokens[i].append(rows[i].choose(last.logits[0], last.tokens[0]))
            self._went_deep(rows[i], count)

    def _went_deep(self, row: Row, waited: int) -> None:
        row.depth.record_plain(self.num_layers)
        if row.trial.resting:
            row.trial.rest(1)
        else:
            self._judge(row, [0 if self._tired(row) else 1] * len(self.stops), waited)
        row.held = row.streak = 0

    def _judge(self, row: Row, asked: list[int], waited: int) -> None:
        if not self.asks_always:
            key = (*asked, waited)
            cost = self._known_costs.get(key)
            if cost is None:
                cost = self._known_costs[key] = self._cost(asked, waited)
            row.trial.saw(1, cost)

    def _cost(self, asked: list[int], waited: int) -> float:
        """Of one token, as if alone, plain decoding being 1: asking exits, then the other layers where ``waited`` tokens need
        them, itself included. One that asks nobody passes the exits."""
        total, first = 0.0, 0
        for stop, count in zip(self.stops, asked, strict=True):
            if count:
                total += self.costs.asking(1, first, stop.exit, again=waited != 1)
            elif waited:
                total += self.costs.segments(1, 1, first, stop.exit.boundary)
            first = stop.exit.boundary
        if waited:
            last, deep = self.costs.step(1, 1), self.skipped.run_deep(waited)
            rest = self.costs.segments(1, deep, first, self.executor.depth) + self.costs.fill(waited - deep, self.stops[0].exit)
            total += rest + last.logits_ms + last.host_ms
        return total / self.costs.full(1, 1, 1)

    @property
    def least_depth(self) -> float:
        """Layers per token that a text takes in any case: the first exit's, and all of them where `max_exit_streak` says so."""
        streak, shallow = self.options.max_exit_streak, self.stops[0].exit.layers
        return (streak * shallow + self.num_layers) / (streak + 1) if streak else shallow

    def _asks(self, row: Row) -> bool:
        """Whether exits are asked about the last token. A held one stands at the last exit: it was asked in an earlier step."""
        return not (row.held or self._tired(row) or (row.trial.resting and not self._over_budget(row)))

    def _over_budget(self, row: Row) -> bool:
        """Whether taking the last token through every layer would take more layers per token than the request may."""
        budget, depths = row.params.depth_budget, row.depth.token_depths
        return budget is not None and sum(depths) + self.num_layers > budget * (len(depths) + 1)

    def _tired(self, row: Row) -> bool:
        """Whether as many tokens as may have left early one after the other."""
        return 0 < self.options.max_exit_streak <= row.streak

    def _take(self, row: Row, stop: _Stop, guess: Guess) -> int:
        assert guess.logits is not None
        row.depth.token_depths.append(stop.exit.layers)
        row.streak += 1
        return row.choose(guess.logits, guess.token)

    def _make_room(self, slots: Slots, rows: Sequence[Row]) -> None:
        """Settle rows in which no further token could wait. A held one brings none."""
        full = [i for i, row in enumerate(rows) if not row.held and row.frontier.done[0] - row.frontier.done[-1] >= _ROOM - 1]
        if full:
            self.skipped.settle(slots, rows, full)

    def _threshold(self, exit: Exit) -> float | None:
        return self.options.threshold if self.options.threshold is not None else exit.info.exit_threshold
