"""Speculation for the sequences of an engine: which of them draft, with what, and how far, for the most expected tokens per ms.

Guesses from texts and earlier replies cost nothing and are judged without being used, so they are used as soon as a text repeats.
The draft head and exits cost time: the head guesses while another guess promises to pay, exits have a `Backoff`, and draft few
tokens until the first ones were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.batch_speedup import exits_pay
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.costs.pass_clock import PassClock
from tide_runtime.depth.executor import Executor
from tide_runtime.depth.options import DepthOptions, Drafters
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.depth.speculation.drafter import Drafter
from tide_runtime.depth.speculation.exits import ExitDrafter
from tide_runtime.depth.speculation.grammar import GrammarDrafter, allowed
from tide_runtime.depth.speculation.head import HeadDrafter
from tide_runtime.depth.speculation.lengths import choose_lengths
from tide_runtime.depth.speculation.package import PackageDrafter
from tide_runtime.depth.speculation.record import SpeculativeSequence, TrackRecord
from tide_runtime.depth.speculation.successors import SuccessorDrafter
from tide_runtime.depth.speculation.text import TextDrafter
from tide_runtime.sequence import TokenSequence

States = Sequence[SpeculativeSequence]


class Speculator:
    """Proposes drafts and learns from what became of them.

    Args:
        passes: what passes through all layers take on this machine; None: the calibration's figures, or a guess, and the draft
            head is not used.
        with_exits: draft with exits, if there are any.
        follows_clock: the number of drafts may depend on the time that passes take.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: DepthOptions,
        executor: Executor,
        passes: CostTable | None,
        with_exits: bool,
        follows_clock: bool,
    ) -> None:
        calibration = manifest.calibration
        tuning = options.tuning
        draft = options.draft
        self.executor = executor
        self.tuning = tuning
        self.max_wait_steps = options.max_wait_steps
        self.costs = CostModel.of(manifest, passes)
        self.clock = PassClock(self.costs, tuning.clock_rate, tuning.max_clock_tilt)
        exit_limit = (calibration.draft_limit if calibration is not None else 0) or tuning.head_draft_limit
        limits = [options.draft_limit or one for one in (tuning.text_draft_limit, tuning.head_draft_limit, exit_limit)]
        self.limit, (text_limit, head_limit, exit_limit) = max(limits), limits
        copies: list[Drafter] = [TextDrafter(text_limit), SuccessorDrafter(text_limit, tuning.successor_entries)]
        self.text = copies if draft in ("ngram", "all") else []
        if draft in ("grammar", "all"):
            self.text.append(GrammarDrafter(text_limit))
        self.package = PackageDrafter(draft, text_limit, manifest) if draft not in get_args(Drafters) else None
        if self.package is not None:
            self.text.append(self.package)
        info = manifest.draft_head if draft in ("head", "all") and passes is not None else None
        self.head = HeadDrafter(info, head_limit, can_rerun=not manifest.is_recurrent)
        # Tokens that stopped at an exit would leave gaps among the pairs in the head's cache.
        exits = executor.exits if draft in ("router", "all") and with_exits and not self.head.has_cache else []
        self.exits = ExitDrafter(executor, exits, exit_limit)
        # Prices of exits are not observed, and a corrected price cannot be compared with one that is not.
        self.follows_clock = follows_clock and passes is not None and tuning.clock_rate > 0 and not exits
        predicted = calibration.predicted.get("exact:router") if calibration is not None else None
        self._expected = predicted if predicted is not None else tuning.uncalibrated_speedup
        shares = {int(layers): share for layers, share in calibration.exit_depths.items()} if calibration is not None else {}
        measured = calibration is not None and calibration.costs is not None
        self._exits_pay = exits_pay(self.costs, exits, shares, tuning.min_batch_speedup, unknown=not measured)

    def start(self, context: ExecutionContext, sequence: TokenSequence) -> SpeculativeSequence:
        """The state of a new sequence. A calibration predicts greedy text; fewer drafts of sampled text are accepted."""
        expected = self._expected if sequence.params.greedy else min(self._expected, self.tuning.uncalibrated_speedup)
        record = TrackRecord(self.tuning, expected, self.head.info, self.package.name if self.package is not None else None)
        return SpeculativeSequence(sequence, self.executor.frontier(context, sequence, room=self.limit + 1), record=record)

    def propose(self, context: ExecutionContext, states: States, prompts: Sequence[PromptChunk]) -> float | None:
        """Put drafts after the sequences' tokens, for a step that the ``prompts`` share.

        Returns the cost of the cycle in full-depth decode steps where exits draft; None: they do not, and a full pass verifies.
        """
        prompt_tokens = sum(chunk.tokens for chunk in prompts)
        for state in states:
            state.begin_step()
        for drafter in self.text:
            drafter.draft(context, states)
        for state in states:
            if state.sequence.grammar is not None:
                state.guess, state.successor_guess = (allowed(state, g) for g in (state.guess, state.successor_guess))
        exits = bool(states and self.exits.exits) and self._exits_pay(len(states))
        if any(state.guess.tokens or state.successor_guess.tokens for state in states):
            speedup = fmean(state.record.exits.speedup for state in states) if exits else 1.0
            self.place_drafts(states, prompt_tokens, min_speedup=speedup)
        ready = [state for state in states if not state.drafts and state.record.exits.active and state.room > 0] if exits else []
        if ready and 2 * len(ready) >= len(states):  # a launch costs nearly as much for a few of the batch as for all
            return self._draft_with_exits(context, states, ready)
        if self.head.info is not None:
            self._draft_with_head(context, states, prompt_tokens)
        return None

    def observe(self, states: States, verified: Sequence[Sequence[int]], ms: float | None, cost: float | None) -> None:
        """A step is over.

        Args:
            verified: the tokens that each sequence got.
            ms: of the verification pass; None where other work shared it.
            cost: of the cycle, as `propose` returned it.
        """
        if ms is not None and cost is None and self.follows_clock and states:
            counts = [1 + len(state.drafts) for state in states]
            self.clock.observe(len(counts), sum(counts), max(counts), ms)
        for state, tokens in zip(states, verified, strict=True):
            record = state.record
            for guess in (state.guess, state.successor_guess, state.head_guess):
                record.observe(guess, tokens)
            if state.successors is not None:
                state.successors.learn(state.tokens, state.sequence.num_tokens, tokens)
            if state.evaluates and cost is not None:
                record.observe_cycle(len(state.drafts), len(tokens) - 1, cost)
            else:
                record.exits.pass_tokens(len(tokens))

    def place_drafts(self, states: States, prompt_tokens: int, spent_ms: float = 0.0, min_speedup: float = 1.0) -> None:
        """Draft as many tokens of each sequence's best guess as pay, after ``spent_ms`` of drafting; ``min_speedup``: see
        `choose_lengths`."""
        best = [state.best_guess() for state in states]
        pass_ms = self.clock.pass_time(prompt_tokens, spent_ms)
        lengths = choose_lengths([chances for _, chances in best], pass_ms, self.tuning.padding_penalty, min_speedup).per_sequence
        for state, (guess, _), length in zip(states, best, lengths, strict=True):
            state.drop_drafts()
            for token in guess.tokens[:length]:
                state.place(token, guess.source)

    def _draft_with_head(self, context: ExecutionContext, states: States, prompt_tokens: int) -> None:
        """Let the draft head guess where it promises more than the best copy, one token more while that pays."""
        for state in states:
            if self.head.waiting(state):
                room = min(self.head.limit, state.room + len(state.drafts))
                state.head_room = room if sum(state.record.head_chances([], room)) > sum(state.best_guess()[1]) else 0
        ready = [state for state in states if state.head_room]
        launches = 0
        pairs = sum(map(self.head.waiting, ready)), len(ready)
        while ready and self.head_pays(states, pairs, launches, prompt_tokens):
            self.head.draft(context, ready)
            launches += 1
        if launches:
            for state in ready:
                state.head_guess = allowed(state, state.head_guess)
            self.place_drafts(states, prompt_tokens, self._head_ms(pairs, launches))
        self.head.read_waiting(context, states)

    def head_pays(self, states: States, pairs: tuple[int, int], launches: int, prompt_tokens: int) -> bool:
        """Whether another guess after ``launches``, or several, gives more expected tokens per ms; ``pairs``: that the first
        launch reads, and a further one."""
        room = min(state.head_room - len(state.head_guess.tokens) for state in states if state.head_room)
        rate = 0.0
        for more in range(room + 1):
            chances = [state.chances_after(more) for state in states]
            pass_ms = self.clock.pass_time(prompt_tokens, self._head_ms(pairs, launches + more))
            found = choose_lengths(chances, pass_ms, self.tuning.padding_penalty).tokens_per_ms
            if more and found > rate:
                return True
            rate = max(rate, found)
        return False

    def _head_ms(self, pairs: tuple[int, int], launches: int) -> float:
        """What ``launches`` of the draft head take; ``pairs``: see `head_pays`."""
        if not launches:
            return 0.0
        return self.costs.draft_head(pairs[0], first=True) + (launches - 1) * self.costs.draft_head(pairs[1], first=False)

    def _draft_with_exits(self, context: ExecutionContext, states: States, ready: States) -> float:
        """Draft with exits in the sequences that are ``ready``; returns the cost of the cycle."""
        for state in states:
            state.frontier.reset(state.sequence.num_cached_tokens)
        for state in ready:
            state.evaluates = True
        drafting = list(ready)
        drafted = 0
        held = 0
        spent = 0.0
        while drafting:
            spent += sum(self.costs.evaluation(*one) for one in self.exits.draft(context, drafting))
            drafted += 1
            drafting = [state for state in drafting if len(state.drafts) == drafted]
            # Sequences that stopped wait for the others only while most go on, and not for long.
            held += len(drafting) < len(ready)
            if 2 * len(drafting) < len(ready) or held > self.max_wait_steps:
                break
            drafting = [s for s in drafting if drafted < min(self.exits.limit, s.record.num_exit_drafts) and s.room > 0]
        return self.cycle_cost(states, spent)

    def cycle_cost(self, states: States, evaluation_ms: float) -> float:
        """What evaluating exits takes, and then the remaining layers for all that waits, in full-depth decode steps."""
        begin = self.exits.exits[0].boundary
        size = len(states)
        waiting = [1 + len(state.drafts) for state in states]
        unevaluated = [state.num_tokens_with_drafts - state.frontier.done[0] for state in states]  # such as the last draft
        ms = evaluation_ms + self.costs.finish(begin, size, sum(waiting), max(waiting))
        if any(unevaluated):
            ms += self.costs.run(0, begin, size, sum(unevaluated), max(unevaluated))
        return ms / self.costs.full(size, size, 1)
