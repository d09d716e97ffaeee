"""``exact``: drafts that a verification pass through the whole model checks. The output is `full`'s.

A step: propose drafts (see `speculation`), run one pass over them and the token before them, keep those that the model's own
logits choose, observe. Where exits drafted, only the layers that their tokens have not been through are run.

Greedy or sampled, a draft is accepted when it is the token that the sequence chooses from the model's logits. A sampled token is
a function of the logits, the seed and the position (`Sampler`), so the text does not depend on what was drafted. Exit heads draft
with the same noise, hence often the same token (coupling without communication: Daliri et al. 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from tide_runtime.backends.base import ExecutionContext, Logits
from tide_runtime.backends.step_arrays import PADDED_TOKENS
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.executor import Executor
from tide_runtime.depth.full import Work, finish_chunks, run_full
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DevicePlan, PromptChunk, TextDrafts, refuse_depth_budget
from tide_runtime.depth.speculation.record import Draft, SpeculativeSequence
from tide_runtime.depth.speculation.speculator import Speculator
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence, note_depth_time


class ExactDepth:
    """Drafts with exits, a draft head, grammars and copies from texts, verifies with the rest of the model.

    Args:
        passes, with_exits: see `Speculator`.
        same_bits: a token's logits are the same however many drafts are verified with it. Otherwise the number of drafts may
            change a text, so it does not depend on time.
    """

    name = "exact"
    can_resume = True
    runs_every_layer = True
    loops_as_rows = False

    def __init__(
        self,
        manifest: Manifest,
        options: DepthOptions,
        passes: CostTable | None = None,
        with_exits: bool = True,
        same_bits: bool = True,
    ) -> None:
        self.executor = Executor(manifest)
        self.num_layers = manifest.model.num_layers
        self._options = options
        self.speculator = Speculator(manifest, options, self.executor, passes, with_exits, follows_clock=same_bits)
        self.lookahead = self.speculator.limit + 1
        self.uses_draft_head = self.speculator.head.info is not None

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def device_plan(self) -> DevicePlan | str:
        """A loop that drafts from texts, where nothing else drafts."""
        speculator = self.speculator
        tuning = self._options.tuning
        if speculator.exits.exits or speculator.head.info is not None:
            return f"policy exact drafts with {'exits' if speculator.exits.exits else 'the draft head'}, which the host drives"
        if speculator.package is not None:
            return f"policy exact drafts with {speculator.package.name}, which the host drives"
        if not speculator.text:
            return "policy exact does not draft from texts"

        def pass_ms(batch_size: int, tokens: int) -> float:
            return speculator.costs.full(batch_size, batch_size * tokens, tokens)

        limit = self._options.draft_limit or PADDED_TOKENS[-1] - 1
        return DevicePlan(self, drafts=TextDrafts(limit, tuning.usual_hit_rates, tuning.hit_rate_weight, pass_ms))

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        state = sequence.policy_state
        return self.speculator.head.reusable(state) if state is not None else sequence.num_cached_tokens

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        began = perf_counter()
        states = [self._state(context, sequence) for sequence in decoding]
        head = self.speculator.head
        prompts = [head.begin(self._state(context, one.sequence), one) for one in prompts] if head.has_cache else prompts
        exits_cost = self.speculator.propose(context, states, prompts)
        proposed = perf_counter()
        if any(state.drafts or state.evaluates for state in states):
            note_depth_time(decoding, began)
        num_logits = [1 + len(state.drafts) for state in states]
        if exits_cost is None:
            work = [Work(sequence, tokens, tokens) for sequence, tokens in zip(decoding, num_logits, strict=True)]
            verified, chunks = run_full(context, work, prompts)
            first = finish_chunks(prompts, chunks)
        else:
            chunks = []
            verified, first = self.executor.advance_all(context, states, num_logits, prompts)
        passed = perf_counter() - proposed
        tokens = [self._accept(*one) for one in zip(states, verified, strict=True)]
        accepted = perf_counter()
        context.cut_rows([s.batch_index for s in decoding], [s.num_cached_tokens for s in decoding])
        if chunks and head.info is not None:  # after `_accept`, as its launch overwrites the states
            head.read_chunks(context, [self._state(context, chunk.sequence) for chunk in prompts], chunks)
        ms = None if prompts else 1e3 * (passed + perf_counter() - accepted)
        self.speculator.observe(states, tokens, ms, exits_cost)
        return tokens + first

    def _state(self, context: ExecutionContext, sequence: TokenSequence) -> SpeculativeSequence:
        sequence.policy_state = sequence.policy_state or self.speculator.start(context, sequence)
        return sequence.policy_state

    def _accept(self, state: SpeculativeSequence, verified: Logits) -> list[int]:
        """The sequence's next tokens; what the model did not confirm is rolled back."""
        sequence, drafts = state.sequence, state.drafts
        tokens, accepted = verify(sequence, drafts, verified)
        state.num_drafts = 0
        sequence.num_cached_tokens = sequence.num_tokens + accepted
        state.frontier.roll_back(sequence.num_cached_tokens)
        self.speculator.head.keep(state, sequence.num_tokens - 1, verified.states, accepted + 1)
        sequence.depth.record([d.source for d in drafts], [d.depth for d in drafts], accepted, self.num_layers)
        return tokens


def verify(sequence: TokenSequence, drafts: Sequence[Draft], verified: Logits) -> tuple[list[int], int]:
    """The sequence's next output tokens and how many of ``drafts`` are among them.

    ``verified`` holds the model's logits after the last output token and after each draft; the drafts stand in
    ``sequence.tokens`` after ``sequence.num_tokens``. Accepted drafts are followed by one token of the model's own.
    """
    tokens: list[int] = []
    for number, draft in enumerate([*drafts, None]):
        tokens.append(token := sequence.choose(verified.logits[number], verified.tokens[number], sequence.num_tokens + number))
        if draft is None or token != draft.token:
            break
        if token in sequence.eos and not sequence.params.ignore_eos:  # what follows would be in the states of a finished text
            return tokens, number + 1
    return tokens, number
