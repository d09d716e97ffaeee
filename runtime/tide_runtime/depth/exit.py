"""``exit``: a token's output is final at the first checkpoint whose router clears its certified threshold.

Its hidden state waits there until a later token needs the keys and values of the layers it skipped. Those layers are then run for
all that waits, so a deep token always attends to exact keys and values (River-LLM's deferred KV; CALM, Schuster et al. 2022, for
the thresholds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.batch_speedup import exits_pay
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.executor import Executor, Guess
from tide_runtime.depth.frontier import LazySequence
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DevicePlan, PromptChunk
from tide_runtime.depth.speculation.record import Backoff, exit_backoff
from tide_runtime.depth.stops import ANY_SCORE, Stop, adds_up, check_budget, is_over_budget, least_of_sum, stops_of
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence, note_depth_time


@dataclass
class ExitState(LazySequence):
    """What `ExitDepth` keeps of a sequence.

    Args:
        backoff: when exits are evaluated again after evaluations that did not pay.
        waited_steps: steps for which the last token has waited for others that need depth.
        streak: early exits since the last deep token.
        staying: probability, by the model's gate, that the last token has left no loop so far.
        full_until: ``num_cached_tokens`` up to which the steps are those of `full`. These leave frontier and backoff where they
            were.
        num_complete: number of first tokens that have been through every layer. A prefill after a preemption runs all layers and
            does not change it, so that the sequence decides as if it had not been preempted.
        refills: number of preemptions that the frontier already reflects.
    """

    backoff: Backoff = field(kw_only=True)
    waited_steps: int = 0
    streak: int = 0
    staying: float = 1.0
    full_until: float = 0
    num_complete: int = 0
    refills: int = 0

    @property
    def waiting(self) -> int:
        """Tokens that layers are missing of."""
        return self.num_tokens_with_drafts - self.num_complete

    @property
    def never_evaluates(self) -> bool:
        return self.full_until == math.inf


class ExitDepth:
    """Stops where a router is confident; the layers it skips are run when a later token needs them.

    Args:
        concurrency: sequences that the engine is loaded for. Whether exits pay among so many is decided once: a text must not
            depend on what else runs.
        evaluates_always: exits are evaluated for every token, also where that does not pay.
    """

    name = "exit"
    lookahead = 1
    runs_every_layer = False
    uses_draft_head, loops_as_rows = False, False

    def __init__(self, manifest: Manifest, options: DepthOptions, concurrency: int = 1, evaluates_always: bool = False) -> None:
        self.manifest, self.options = manifest, options
        self.adds_up = adds_up(options)
        self.evaluates_always = evaluates_always or self.adds_up  # the model's rule is one of quality, whatever it gains
        self.executor = Executor(manifest)
        self.num_layers = manifest.model.num_layers
        self.costs = CostModel.of(manifest)
        self.concurrency = concurrency
        self.full = FullDepth()
        self.stops = stops_of(manifest, options)
        self._exits = [stop.exit for stop in self.stops]
        known = manifest.calibration if options.threshold is None else None  # other thresholds have other shares
        shares = {int(layers): share for layers, share in known.exit_depths.items()} if known is not None else {}
        self._exits_pay = exits_pay(self.costs, self._exits, shares, options.tuning.min_batch_speedup)
        self._known_costs: dict[tuple[int, ...], float] = {}

    @property
    def can_resume(self) -> bool:
        """A prefill does not give the keys and values that a tail has drafted."""
        return not any(stop.exit.info.tail_layers for stop in self.stops)

    def check_params(self, params: GenerationParams) -> None:
        check_budget(params, self.stops, self.options, self.num_layers)

    def device_plan(self) -> DevicePlan | str:
        if any(stop.exit.info.tail_layers for stop in self.stops):
            return "an exit's tail attends to keys and values that a loop on the device completes sooner than the host"
        if self.adds_up:
            return "the model's own exit rule adds up probabilities on the host"
        if (read := next((stop.exit.info for stop in self.stops if stop.exit.score_graph is not None), None)) is not None:
            return f"router {read.router} of {read.router_package} reads logits, which a loop on the device does not score"
        if self.options.max_exit_streak:
            return "max_exit_streak is counted on the host"
        always = ExitDepth(self.manifest, self.options, self.concurrency, evaluates_always=True)
        return DevicePlan(always, [(stop.exit, stop.threshold) for stop in self.stops], self._nothing_waits)

    @staticmethod
    def _nothing_waits(sequence: TokenSequence) -> bool:
        state = cast("ExitState | None", sequence.policy_state)
        return state is None or state.frontier.done[-1] == state.frontier.done[0]

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        if not self.can_resume:
            return 0
        state = cast("ExitState | None", sequence.policy_state)
        if state is None or state.refills != sequence.history.refills:  # prefilled again: the frontier is of the lost row
            return sequence.num_cached_tokens
        if state.frontier.done[0] < sequence.num_cached_tokens:  # steps of `full` leave the frontier behind
            return sequence.num_cached_tokens
        return state.frontier.done[-1]

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        if not decoding:
            return self.full.step(context, [], prompts)
        states = [self._state(context, sequence) for sequence in decoding]
        if all(state.sequence.num_cached_tokens < state.full_until for state in states):
            return self._full_step(context, decoding, prompts)
        for state in states:
            self._catch_up(state)
        if all(self._rests(state) for state in states):
            for state in states:
                rests = state.backoff.cooldown if state.sequence.params.depth_budget is None else 0
                state.full_until = state.sequence.num_cached_tokens + rests
            return self._full_step(context, decoding, prompts)
        return self._step(context, states, prompts)

    def _state(self, context: ExecutionContext, sequence: TokenSequence) -> ExitState:
        if sequence.policy_state is None:
            tuning = self.options.tuning
            frontier = self.executor.frontier(context, sequence, room=tuning.exit_room)
            state = ExitState(sequence, frontier, backoff=exit_backoff(tuning), num_complete=sequence.num_cached_tokens)
            if not self._evaluates_ever(sequence):
                state.full_until = math.inf
                sequence.depth.ran_full = True
            sequence.policy_state = state
        state = cast(ExitState, sequence.policy_state)
        if state.refills != sequence.history.refills:
            self._catch_up(state)
        return state

    def _evaluates_ever(self, sequence: TokenSequence) -> bool:
        """Whether exits are evaluated at all for a sequence: its parameters decide, and what the engine was loaded for."""
        kept = sequence.params.depth_budget is not None or self.evaluates_always  # whatever that costs
        return kept or self._exits_pay(self.concurrency)

    def _step(self, context: ExecutionContext, states: Sequence[ExitState], prompts: Sequence[PromptChunk]) -> list[list[int]]:
        """A step in which exits are evaluated, or tokens wait."""
        everyone = range(len(states))
        began = perf_counter()
        self._make_room(context, states)
        tokens: list[list[int]] = [[] for _ in states]
        evaluated = [[0] * len(self.stops) for _ in states]
        undecided = [i for i in everyone if self._evaluates(states[i])]
        first = 0
        for i in undecided:
            states[i].staying = 1.0
        if undecided:  # the others go along to the first exit: one launch for all
            first = self.stops[0].exit.boundary
            self.executor.advance(context, states, [i for i in everyone if not states[i].waited_steps], 0, first)
        for number, stop in enumerate(self.stops):
            if not undecided:
                break
            if first < stop.exit.boundary:
                self.executor.advance(context, states, undecided, first, stop.exit.boundary)
            thresholds = [self._min_score(states[i], stop) for i in undecided]
            min_scores = [
                ANY_SCORE if self._over_budget(states[i]) else enough for i, enough in zip(undecided, thresholds, strict=True)
            ]
            guesses = self.executor.evaluate(context, states, undecided, stop.exit, min_scores)
            for i, guess, enough, freely in zip(undecided, guesses, min_scores, thresholds, strict=True):
                evaluated[i][number] = 1
                states[i].staying *= 1 - guess.score
                if guess.logits is not None and guess.score >= enough:  # a NaN clears nothing
                    states[i].sequence.depth.forced += guess.score < freely
                    tokens[i].append(self._stop_at(states[i], stop, guess))
                    self._observe(states[i], evaluated[i], waited=0)
            undecided = [i for i in undecided if not tokens[i]]
            first = stop.exit.boundary
        note_depth_time((state.sequence for state in states), began)
        first_tokens = self._go_deep(context, states, [i for i in everyone if not tokens[i]], tokens, prompts)
        for state in states:
            state.sequence.num_cached_tokens = state.frontier.done[0]
        return tokens + first_tokens

    def _full_step(
        self, context: ExecutionContext, sequences: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        """A step of `full` for all, where exits do not pay and nothing waits, with little around it."""
        tokens = self.full.step(context, sequences, prompts)
        for sequence in sequences:
            sequence.depth.record_full_step(self.num_layers)
        return tokens

    @staticmethod
    def _catch_up(state: ExitState) -> None:
        """Bring frontier and backoff up to date after steps of `full`, and after a preemption."""
        cached = state.sequence.num_cached_tokens
        lost = state.refills != state.sequence.history.refills
        passed = cached - state.frontier.done[0]
        if passed > 0:
            state.backoff.pass_tokens(passed)
            state.num_complete = cached
        if passed > 0 or lost:
            state.frontier.reset(cached)
            state.refills = state.sequence.history.refills

    def _rests(self, state: ExitState) -> bool:
        """Whether the sequence is in a cooldown, nothing of it waits, and its depth budget allows a full-depth token."""
        nothing_waits = state.num_complete == state.sequence.num_cached_tokens
        return not state.backoff.active and nothing_waits and not self._over_budget(state)

    def _go_deep(
        self,
        context: ExecutionContext,
        states: Sequence[ExitState],
        needy: list[int],
        tokens: list[list[int]],
        prompts: Sequence[PromptChunk],
    ) -> list[list[int]]:
        """Run the remaining layers for the sequences that need them: when these are most, when one has waited long enough, or
        when prompts take that way. Returns the first tokens behind the prompts."""
        few = 2 * len(needy) < len(states) and all(states[i].waited_steps < self.options.max_wait_steps for i in needy)
        if few and not prompts:
            for i in needy:
                states[i].waited_steps += 1
            return []
        deep, first = self.executor.advance_all(context, [states[i] for i in needy], [1] * len(needy), prompts)
        for i, last in zip(needy, deep, strict=True):
            tokens[i].append(states[i].sequence.choose(last.logits[0], last.tokens[0]))
            self._went_deep(states[i])
        return first

    def _went_deep(self, state: ExitState) -> None:
        state.sequence.depth.record_full_step(self.num_layers)
        waited = state.waiting
        state.num_complete = state.frontier.done[-1]
        if state.backoff.active and not state.never_evaluates:
            self._observe(state, [0 if self._must_go_deep(state) else 1] * len(self.stops), waited)
        else:
            state.backoff.pass_tokens(1)
        state.waited_steps = state.streak = 0

    def _observe(self, state: ExitState, evaluated: list[int], waited: int) -> None:
        if not self.evaluates_always:
            state.backoff.observe(1, self.token_cost(evaluated, waited))

    def token_cost(self, evaluated: Sequence[int], waited: int) -> float:
        """See `CostModel.early_exit_token`."""
        key = (*evaluated, waited)
        cost = self._known_costs.get(key)
        if cost is None:
            cost = self._known_costs[key] = self.costs.early_exit_token(self._exits, evaluated, waited)
        return cost

    def _evaluates(self, state: ExitState) -> bool:
        """Whether exits are evaluated for the last token. A held one stands at the last exit: it was evaluated before."""
        if state.waited_steps or state.never_evaluates or self._must_go_deep(state):
            return False
        return state.backoff.active or self._over_budget(state)

    def _over_budget(self, state: ExitState) -> bool:
        """Whether a full-depth token would take more layers per token than the request may."""
        return is_over_budget(state.sequence, self.num_layers)

    def _must_go_deep(self, state: ExitState) -> bool:
        """Whether as many tokens as allowed have stopped early one after the other."""
        return 0 < self.options.max_exit_streak <= state.streak

    def _stop_at(self, state: ExitState, stop: Stop, guess: Guess) -> int:
        assert guess.logits is not None
        state.sequence.depth.token_depths.append(stop.exit.layers)
        state.streak += 1
        return state.sequence.choose(guess.logits, guess.token)

    def _make_room(self, context: ExecutionContext, states: Sequence[ExitState]) -> None:
        """Complete sequences in which no further token could wait. A held one adds none."""
        most = self.options.tuning.exit_room - 1
        full = [i for i, s in enumerate(states) if not s.waited_steps and s.frontier.done[0] - s.num_complete >= most]
        if full:
            self.executor.advance(context, states, full, 1, self.executor.num_segments)
            for i in full:
                states[i].num_complete = states[i].frontier.done[-1]

    def _min_score(self, state: ExitState, stop: Stop) -> float:
        """The score from which on the last token stops there."""
        return least_of_sum(stop, state.staying) if self.adds_up else stop.threshold
