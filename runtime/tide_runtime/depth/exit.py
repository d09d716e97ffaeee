"""``exit``: a token's output is final at the first checkpoint whose router clears its certified threshold.

Its hidden state waits there until a later token needs the keys and values of the layers it skipped (see `skipped_layers`). By
default those layers are then run for all that waits, so a deep token always attends to exact keys and values (River-LLM's
deferred KV; CALM, Schuster et al. 2022, for the thresholds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.batch_speedup import ExitGate
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.early_exit_prefill import ExitingPrefill
from tide_runtime.depth.executor import Executor, Guess
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.requirements import check_fills, check_tails, no_exit, too_deep
from tide_runtime.depth.skipped_kv import Deferred, Propagated, SkippedLayers
from tide_runtime.errors import ParamsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence, note_exit_time

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
            CostModel(manifest),
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

    def check_params(self, params: GenerationParams) -> None:
        budget, least, streak = params.depth_budget, self.least_depth, self.options.max_exit_streak
        if budget is not None and budget < least:
            then = (
                f" and max_exit_streak {streak} sends one token in {streak + 1} through all {self.num_layers}" if streak else ""
            )
            raise ParamsError(
                f"depth_budget is {budget} layers, the first exit comes after {self.stops[0].exit.layers}{then}; "
                f"set it to at least {least:g}"
            )

    def why_on_host(self, pads_sequences: bool) -> str | None:
        if not pads_sequences:
            return "ONNX Runtime's attention takes several tokens of one sequence only; exits are evaluated from the host"
        if any(stop.exit.info.tail_layers for stop in self.stops):
            return "an exit's tail attends to keys and values that a loop on the device settles sooner than the host"
        if self.options.max_exit_streak or self.options.kv != "deferred":
            return "max_exit_streak and propagated keys and values are the host's"
        return None

    def for_device_loop(self) -> list[tuple[Exit, float]]:
        self.asks_always = True
        return [(stop.exit, stop.threshold) for stop in self.stops]

    def prefill(self, context: ExecutionContext, row: TokenSequence) -> int:
        token = self.exiting_prefill.run(context, row) if self.exiting_prefill else self.full.prefill(context, row)
        row.frontier = self.executor.frontier(context, row, room=_ROOM)
        return token

    def decode(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        if all(row.num_cached_tokens < row.plain_until for row in rows):
            return self._plain(context, rows)
        budget = rows[0].params.depth_budget  # must be kept whatever that costs
        if budget is None and not self.asks_always and not self.gate.opens(rows[0].batch_size, rows[0].params.greedy):
            return self._leave_to_full(context, rows)
        for row in rows:
            self._catch_up(row)
        if all(
            row.trial.resting and row.frontier.done[-1] == row.num_cached_tokens and not self._over_budget(row) for row in rows
        ):
            for row in rows:
                row.plain_until = row.num_cached_tokens + (row.trial.resting if row.params.depth_budget is None else 0)
            return self._plain(context, rows)
        everyone, began = range(len(rows)), perf_counter()
        self._make_room(context, rows)
        tokens: list[list[int]] = [[] for _ in rows]
        asked = [[0] * len(self.stops) for _ in rows]
        undecided, first = [i for i in everyone if self._asks(rows[i])], 0
        if undecided:  # rows that do not ask go along to the first exit: one launch for all
            first = self.stops[0].exit.boundary
            self.executor.advance(context, rows, [i for i in everyone if not rows[i].held], 0, first)
        for number, stop in enumerate(self.stops):
            if not undecided:
                break
            if first < stop.exit.boundary:
                self.skipped.make_way(context, rows, undecided)
                self.executor.advance(context, rows, undecided, first, stop.exit.boundary)
            least = [_ANY_SCORE if self._over_budget(rows[i]) else stop.threshold for i in undecided]
            guesses = self.executor.ask(context, rows, undecided, stop.exit, least)
            for i, guess, enough in zip(undecided, guesses, least, strict=True):
                asked[i][number] = 1
                if guess.logits is not None and guess.score >= enough:  # a NaN clears nothing
                    rows[i].depth.forced += guess.score < stop.threshold
                    tokens[i].append(self._take(rows[i], stop, guess))
                    self._judge(rows[i], asked[i], waited=0)
            undecided, first = [i for i in undecided if not tokens[i]], stop.exit.boundary
        note_exit_time(rows, began)
        self._go_deep(context, rows, [i for i in everyone if not tokens[i]], tokens)
        for row in rows:
            row.num_cached_tokens = row.frontier.done[0]
        return tokens

    def _leave_to_full(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        for row in rows:
            row.ran_full = True
            row.depth.record_plain(self.num_layers)
        return self.full.decode(context, rows)

    def _plain(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        """Exits do not pay just now and nothing waits: a step of `full`, with little around it."""
        tokens = self.full.decode(context, rows)
        for row in rows:
            row.depth.record_plain(self.num_layers)
        return tokens

    def _catch_up(self, row: TokenSequence) -> None:
        """With plain steps, which leave frontier and trial where they were."""
        passed = row.num_cached_tokens - row.frontier.done[0]
        if passed:
            row.frontier.reset(row.num_cached_tokens)
            row.trial.rest(passed)

    def _go_deep(
        self, context: ExecutionContext, rows: Sequence[TokenSequence], needy: list[int], tokens: list[list[int]]
    ) -> None:
        """Run the rest for the rows that need it: when that is most rows, or one has waited long enough."""
        if not needy:
            return
        if 2 * len(needy) < len(rows) and all(rows[i].held < self.options.max_wait_steps for i in needy):
            for i in needy:
                rows[i].held += 1
            return
        waited = [rows[i].num_tokens_with_drafts - rows[i].frontier.done[-1] for i in needy]
        self.skipped.make_way(context, rows, needy)
        deep = self.executor.advance(context, rows, needy, 0, self.executor.depth, [1] * len(needy))
        for i, last, count in zip(needy, deep, waited, strict=True):
            tokens[i].append(rows[i].choose(last.logits[0], last.tokens[0]))
            self._went_deep(rows[i], count)

    def _went_deep(self, row: TokenSequence, waited: int) -> None:
        row.depth.record_plain(self.num_layers)
        if row.trial.resting:
            row.trial.rest(1)
        else:
            self._judge(row, [0 if self._tired(row) else 1] * len(self.stops), waited)
        row.held = row.streak = 0

    def _judge(self, row: TokenSequence, asked: list[int], waited: int) -> None:
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

    def _asks(self, row: TokenSequence) -> bool:
        """Whether exits are asked about the last token. A held one stands at the last exit: it was asked in an earlier step."""
        return not (row.held or self._tired(row) or (row.trial.resting and not self._over_budget(row)))

    def _over_budget(self, row: TokenSequence) -> bool:
        """Whether taking the last token through every layer would take more layers per token than the request may."""
        budget, depths = row.params.depth_budget, row.depth.token_depths
        return budget is not None and sum(depths) + self.num_layers > budget * (len(depths) + 1)

    def _tired(self, row: TokenSequence) -> bool:
        """Whether as many tokens as may have left early one after the other."""
        return 0 < self.options.max_exit_streak <= row.streak

    def _take(self, row: TokenSequence, stop: _Stop, guess: Guess) -> int:
        assert guess.logits is not None
        row.depth.token_depths.append(stop.exit.layers)
        row.streak += 1
        return row.choose(guess.logits, guess.token)

    def _make_room(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> None:
        """Settle rows in which no further token could wait. A held one brings none."""
        full = [i for i, row in enumerate(rows) if not row.held and row.frontier.done[0] - row.frontier.done[-1] >= _ROOM - 1]
        if full:
            self.skipped.settle(context, rows, full)

    def _threshold(self, exit: Exit) -> float | None:
        return self.options.threshold if self.options.threshold is not None else exit.info.exit_threshold
