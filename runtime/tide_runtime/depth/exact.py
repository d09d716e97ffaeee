"""``exact``: early exits, the draft head and earlier text draft tokens, which a verification pass checks. The output is `full`'s.

A cycle: while the router is confident, a sequence's last token is run to a checkpoint only, and the exit head's token is a draft.
Then the remaining layers are run once for all that waits, and the drafts are compared with the model's own logits
(self-speculative decoding: LayerSkip, Elhoushi et al. 2024; Kangaroo, Liu et al. 2024). Where a text repeats, drafts are copied
from it; where a grammar leaves no choice, its tokens are drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext, Logits
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.executor import Executor, Guess
from tide_runtime.depth.frontier import LazySequence
from tide_runtime.depth.full import Work, finish_chunks, run_full
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import PromptChunk, note_depth_time, refuse_depth_budget
from tide_runtime.drafting.controller import DraftController, DraftState
from tide_runtime.drafting.head_drafts import draft_with_head
from tide_runtime.drafting.text_drafter import NO_GUESS, TextGuess
from tide_runtime.drafting.verification import Draft, verify
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence
from tide_runtime.text.grammar import GrammarState


@dataclass
class ExactState(LazySequence):
    """What `ExactDepth` keeps of a sequence. Full passes leave the frontier where it was.

    Args:
        draft_states: [2H], of the token before the last one, where there is a draft head and the uncut graph ran the token.
    """

    drafting: DraftState | None = None
    draft_states: NDArray[np.generic] | None = None

    @property
    def control(self) -> DraftState:
        assert self.drafting is not None
        return self.drafting


class ExactDepth:
    """Drafts with exits, a draft head and copies from texts, verifies with the rest of the model.

    Args:
        passes: what passes through all layers take on this machine; None: the calibration's figures, or a guess, and the draft
            head is not used.
        with_exits: draft with exits, if there are any.
        same_bits: a token's logits are the same however many drafts are verified with it. Otherwise the number of drafts may
            change a text, so it does not depend on time.
    """

    name, can_resume, runs_every_layer = "exact", True, True

    def __init__(
        self,
        manifest: Manifest,
        options: DepthOptions,
        passes: CostTable | None = None,
        with_exits: bool = True,
        same_bits: bool = True,
    ) -> None:
        self.executor, self.costs = Executor(manifest), CostModel.of(manifest, passes)
        self.num_layers, self.max_wait_steps = manifest.model.num_layers, options.max_wait_steps
        self._follows_clock = same_bits
        self._started: list[TokenSequence] = []  # and not yet seen to have ended
        calibration, tuning = manifest.calibration, options.tuning
        wanted = options.draft_limit or (calibration.draft_limit if calibration is not None else 0)
        self.limit = wanted or tuning.draft_limit
        self.text_limit = options.draft_limit or tuning.text_draft_limit
        self.head_limit = options.draft_limit or tuning.head_draft_limit
        self.lookahead = max(self.limit, self.text_limit, self.head_limit) + 1
        self.looks_up = options.draft in ("ngram", "all")
        self.drafts_grammar = options.draft in ("grammar", "all")
        self.exits = self.executor.exits if options.draft in ("router", "all") and with_exits else []
        has_head = options.draft in ("head", "all") and passes is not None
        self.controller = DraftController(
            self.costs,
            tuning,
            self.exits,
            calibration.predicted.get("exact:router") if calibration is not None else None,
            {int(layers): share for layers, share in calibration.exit_depths.items()} if calibration is not None else {},
            measured=calibration is not None and calibration.costs is not None,
            draft_head=manifest.draft_head if has_head else None,
        )

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def device_plan(self, pads_sequences: bool) -> str:
        return "policy exact decides on the host"

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        return sequence.num_cached_tokens

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        began = perf_counter()
        states = [self._state(context, sequence) for sequence in decoding]
        greedy = all(sequence.params.greedy for sequence in decoding)
        may = bool(states) and self.controller.evaluates_exits(len(states), greedy)
        drafts = self._look_up(states, may, prompts) if self._guess(states) else [[] for _ in states]
        speculating = self._speculating(states, drafts) if may else []
        if not speculating:
            head_ms = self._draft_with_head(context, states, drafts, prompts) if self.controller.draft_head is not None else 0.0
            if any(drafts):
                note_depth_time(decoding, began)
            return self._verify_in_full(context, states, drafts, prompts, head_ms)
        for state in states:
            state.frontier.reset(state.sequence.num_cached_tokens)
        evaluation_ms = self._draft_with_exits(context, states, speculating, drafts)
        note_depth_time(decoding, began)
        unevaluated = [state.num_tokens_with_drafts - state.frontier.done[0] for state in states]
        waiting = [len(made) + 1 for made in drafts]
        verified, first = self.executor.advance_all(context, states, waiting, prompts)
        accepted = [self._verify(state, made, logits) for state, made, logits in zip(states, drafts, verified, strict=True)]
        cost = self.cycle_cost(evaluation_ms, unevaluated, waiting)
        for i, state in enumerate(states):
            if i in speculating:
                state.control.observe_cycle(len(drafts[i]), len(accepted[i]) - 1, cost)
            else:
                state.control.exits.pass_tokens(len(accepted[i]))
        return accepted + first

    def _state(self, context: ExecutionContext, sequence: TokenSequence) -> ExactState:
        if sequence.policy_state is None:
            frontier = self.executor.frontier(context, sequence, room=self.lookahead)
            sequence.policy_state = ExactState(sequence, frontier, drafting=self.controller.start(sequence.params))
            self._finish_ended()
            self._started.append(sequence)
        return cast(ExactState, sequence.policy_state)

    def _finish_ended(self) -> None:
        """Let the outputs of sequences that have ended draft for new ones."""
        running = []
        for sequence in self._started:
            if sequence.finish_reason is None and sequence.error is None:
                running.append(sequence)
            else:
                self.controller.finish(sequence.policy_state.control, sequence.new_tokens.tolist())
        self._started = running

    def _verify_in_full(
        self,
        context: ExecutionContext,
        states: Sequence[ExactState],
        drafts: Sequence[list[Draft]],
        prompts: Sequence[PromptChunk],
        head_ms: float,
    ) -> list[list[int]]:
        """A full pass over the drafts of text or the draft head, if any: most steps of most texts."""
        work = [Work(state.sequence, len(made) + 1, len(made) + 1) for state, made in zip(states, drafts, strict=True)]
        began = perf_counter()
        logits, chunks = run_full(context, work, prompts)
        if not prompts and self._follows_clock:
            counts = [one.tokens for one in work]
            self.controller.observe_pass(counts, 1e3 * (perf_counter() - began))
        tokens = [self._verify(state, made, found) for state, made, found in zip(states, drafts, logits, strict=True)]
        controls = [state.control for state in states]
        self.controller.settle(controls, [len(made) for made in drafts], [len(taken) for taken in tokens], head_ms)
        for control, taken in zip(controls, tokens, strict=True):
            control.exits.pass_tokens(len(taken))
            if control.head is not None:
                control.head.start_guessing(0)
        first = finish_chunks(prompts, chunks)
        for chunk, found in zip(prompts, chunks, strict=True):
            if found.tokens and found.states is not None:  # the draft head guesses behind the prompt
                self._state(context, chunk.sequence).draft_states = found.states[-1].copy()
        return tokens + first

    def _guess(self, states: Sequence[ExactState]) -> bool:
        """Look up how each text must or may go on; returns whether any may."""
        if not (self.looks_up or self.drafts_grammar):
            return False
        for state in states:
            sequence, limit = state.sequence, min(self.text_limit, state.room)
            guess = NO_GUESS
            if self.looks_up:
                guess = state.control.text.guess(sequence.tokens, sequence.num_tokens, limit)
            if sequence.grammar is not None:
                guess = self._follow_grammar(sequence.grammar, guess, limit)
            state.control.guess = guess
        return any(state.control.guess.tokens for state in states)

    def _follow_grammar(self, grammar: GrammarState, guess: TextGuess, limit: int) -> TextGuess:
        """The tokens that ``grammar`` forces, or else those of ``guess`` that it allows."""
        if self.drafts_grammar and (forced := grammar.forced()[:limit]):
            return TextGuess(forced, 0, forced=True)
        return TextGuess(guess.tokens[: grammar.num_valid(guess.tokens)], guess.matched) if guess.tokens else guess

    def _look_up(self, states: Sequence[ExactState], may: bool, prompts: Sequence[PromptChunk]) -> list[list[Draft]]:
        """Drafts from the guesses, where they are likely enough to pay in a step that the ``prompts`` share."""
        prompt_tokens = sum(chunk.tokens for chunk in prompts)
        lengths = self.controller.text_draft_lengths([state.control for state in states], may, prompt_tokens)
        controls = [state.control for state in states]
        return [
            self._place(state, control.guess.tokens[:n], control.guess_source) if n else []
            for state, control, n in zip(states, controls, lengths, strict=True)
        ]

    @staticmethod
    def _place(state: ExactState, guess: Sequence[int], source: str) -> list[Draft]:
        if source == "head" and state.sequence.grammar is not None:
            guess = guess[: state.sequence.grammar.num_valid(guess)]
        state.num_drafts = len(guess)
        end = state.sequence.num_tokens
        state.tokens[end : end + len(guess)] = guess
        return [Draft(token, source, 0) for token in guess]

    def _draft_with_head(
        self, context: ExecutionContext, states: Sequence[ExactState], drafts: list[list[Draft]], prompts: Sequence[PromptChunk]
    ) -> float:
        """Let the draft head guess where that promises more than the drafts from text, while it pays; returns the modelled ms."""
        controls, prompt_tokens = [state.control for state in states], sum(chunk.tokens for chunk in prompts)
        text = [control.text_chances[: len(made)] for control, made in zip(controls, drafts, strict=True)]
        price = self.controller.head_price(len(states))
        ready = [
            i
            for i, state in enumerate(states)
            if state.draft_states is not None
            and controls[i].starts_head(min(self.head_limit, state.room + len(drafts[i])), text[i], price)
        ]
        spent = 0.0
        if ready:
            sequences = [state.sequence for state in states]
            hidden = np.stack([found for i in ready if (found := states[i].draft_states) is not None])
            spent = draft_with_head(context, self.controller, sequences, controls, text, ready, hidden, prompt_tokens)
        if spent:
            chosen = [control.better_guess(own) for control, own in zip(controls, text, strict=True)]
            lengths = self.controller.lengths(controls, [guess.chances for guess in chosen], spent, prompt_tokens)
            for i, guess in enumerate(chosen):
                drafts[i] = self._place(states[i], guess.tokens[: lengths[i]], guess.source)
        return spent

    def _speculating(self, states: Sequence[ExactState], drafts: Sequence[list[Draft]]) -> Sequence[int]:
        """The sequences that draft with exits: those without other drafts whose backoff is over."""
        ready = [i for i, state in enumerate(states) if not drafts[i] and state.control.exits.active and state.room > 0]
        return self.controller.sequences_to_speculate(ready, len(states))

    def _draft_with_exits(
        self, context: ExecutionContext, states: Sequence[ExactState], speculating: Sequence[int], drafts: list[list[Draft]]
    ) -> float:
        """Draft with exit heads in the ``speculating`` sequences; returns the modelled ms that it took."""
        drafting, started, held, spent = list(speculating), len(speculating), 0, 0.0
        while drafting:
            drafting, cost = self._draft_once(context, states, drafting, drafts)
            spent += cost
            # Sequences that stopped wait for the others only while most go on, and not for long.
            held += len(drafting) < started
            if 2 * len(drafting) < started or held > self.max_wait_steps:
                break
            drafting = [i for i in drafting if self._may_go_on(states[i], len(drafts[i]))]
        return spent

    def _may_go_on(self, state: ExactState, drafted: int) -> bool:
        return drafted < min(self.limit, state.control.num_speculative_tokens) and state.room > 0

    def _draft_once(
        self, context: ExecutionContext, states: Sequence[ExactState], drafting: list[int], drafts: list[list[Draft]]
    ) -> tuple[list[int], float]:
        """One more draft for each sequence: from the first exit that is confident.

        Returns the sequences with a draft, and the modelled ms.
        """
        sure: list[int] = []
        unsure, run, spent = drafting, 0, 0.0
        for early_exit in self.exits:
            self.executor.advance(context, states, unsure, run, early_exit.boundary)
            threshold = early_exit.info.exact_threshold
            guesses = self.executor.evaluate(context, states, unsure, early_exit, [threshold] * len(unsure))
            with_head = any(guess.logits is not None for guess in guesses)
            spent += self.costs.evaluation(len(unsure), run, early_exit, with_head)
            run = early_exit.boundary
            for i, guess in zip(unsure, guesses, strict=True):
                if guess.score >= threshold and guess.logits is not None:
                    drafts[i].append(_draft(states[i], guess, early_exit.layers))
                    sure.append(i)
            unsure = [i for i in unsure if i not in sure]
            if not unsure:
                break
        return sorted(sure), spent

    def _verify(self, state: ExactState, drafts: list[Draft], verified: Logits) -> list[int]:
        """The sequence's next tokens. Rolls it back to what was accepted, and learns from it."""
        tokens, accepted = verify(state.sequence, drafts, verified)
        sequence = state.sequence
        state.num_drafts = 0
        sequence.num_cached_tokens = sequence.num_tokens + accepted
        state.frontier.roll_back(sequence.num_cached_tokens)
        states = verified.states
        state.draft_states = states[accepted].copy() if states is not None else None
        sequence.depth.record([d.source for d in drafts], [d.depth for d in drafts], accepted, self.num_layers)
        state.control.observe_tokens(tokens)
        return tokens

    def cycle_cost(self, evaluation_ms: float, unevaluated: list[int], waiting: list[int]) -> float:
        """Cost of a cycle in full-depth decode steps: evaluating exits, then the remaining layers for all that waits.

        Args:
            unevaluated: each sequence's tokens that no exit was evaluated for, such as its last draft.
            waiting: all of its tokens.
        """
        batch_size, begin = len(waiting), self.exits[0].boundary
        launches = self.costs.finish(begin, batch_size, sum(waiting), max(waiting))
        if any(unevaluated):
            launches.append(self.costs.run(0, begin, batch_size, sum(unevaluated), max(unevaluated)))
        return (evaluation_ms + self.costs.price(launches)) / self.costs.full(batch_size, batch_size, 1)


def _draft(state: ExactState, guess: Guess, depth: int) -> Draft:
    """Take the exit head's token as a draft, placed behind the sequence's tokens and drafts.

    A sampled draft is drawn with the noise of its position, as the verification's token will be: see `verification`.
    """
    assert guess.logits is not None
    place = state.num_tokens_with_drafts
    token = state.sequence.pick(guess.logits, guess.token, place)
    state.tokens[place] = token
    state.num_drafts += 1
    return Draft(token, "router", depth)
