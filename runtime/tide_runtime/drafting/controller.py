"""The drafting controller: which sequences draft, with what, and how far, for the most expected tokens per ms.

Text drafts are judged without being used: each guess is compared with the tokens that follow (`HitRates`), so they are used as
soon as the text repeats. Evaluating exits costs time, so exits have a `Backoff`, and draft few tokens until the first ones were
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.batch_speedup import ExitGate
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.costs.observed_passes import ObservedPasses
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.backoff import Backoff
from tide_runtime.drafting.draft_head import HeadDrafts
from tide_runtime.drafting.hit_rates import HitRates
from tide_runtime.drafting.ledger import Ledger
from tide_runtime.drafting.text_drafter import NO_GUESS, TextDrafter, TextGuess, TextPools
from tide_runtime.generation_params import GenerationParams

PassTime = Callable[[int, int, int], float]  # ms of a full pass, by batch size, tokens in all, tokens of the longest sequence


class Chosen(NamedTuple):
    """Drafts of one sequence from one ``source``, and the chance of each that it and all before it are right."""

    source: str
    tokens: Sequence[int]
    chances: Sequence[float]


@dataclass
class DraftState:
    """What the controller knows of one sequence.

    Args:
        exits: backoff of exit drafts.
        rates: of the text drafter's guesses.
        ledger: of drafts from text and the draft head.
        guess: the tokens that the text drafter expects next.
        head: what is known of the draft head; None: there is none.
        num_speculative_tokens: most exit drafts of the next cycle.
    """

    tuning: DepthTuning
    exits: Backoff
    text: TextDrafter = field(default_factory=TextDrafter)
    guess: TextGuess = NO_GUESS
    head: HeadDrafts | None = None
    rates: HitRates = field(init=False)
    ledger: Ledger = field(init=False)
    num_speculative_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.tuning)
        self.rates = HitRates(self.tuning.hit_rate_weight, self.tuning.hit_rate_memory)
        self.num_speculative_tokens = self.tuning.first_speculative_tokens

    def starts_head(self, room: int, text: Sequence[float], price: float) -> bool:
        """Whether the draft head may guess now, up to ``room`` tokens: it promises more than drafts from text with the chances
        ``text``, and the ledger pays the ``price`` of a first guess."""
        if self.head is None:
            return False
        self.head.start_guessing(room)
        return self.head.promise > sum(text) and price <= self.ledger.balance

    def better_guess(self, text: Sequence[float]) -> Chosen:
        """The head's guesses or the drafts from text, with the chances ``text``: where both begin alike those from text."""
        tokens = self.guess.tokens[: len(text)]
        if self.head is None or not self.head.tokens or (tokens and tokens[0] == self.head.tokens[0]):
            return Chosen(self.guess_source, tokens, text)
        chances = self.head.chances
        if sum(chances) > sum(text):
            return Chosen("head", self.head.tokens, chances)
        return Chosen(self.guess_source, tokens, text)

    @property
    def guess_source(self) -> str:
        return "grammar" if self.guess.forced else "ngram"

    @property
    def text_chances(self) -> list[float]:
        """Of each token of the guess, that it and all before it are right."""
        return [1.0] * len(self.guess.tokens) if self.guess.forced else self.rates.chances(self.guess.evidence)

    def observe_tokens(self, tokens: Sequence[int]) -> None:
        """Learn from the ``tokens`` that followed the guesses."""
        if not self.guess.forced:
            self.rates.observe(self.guess.tokens, self.guess.evidence, tokens)
        if self.head is not None:
            self.head.observe(tokens)

    def observe_cycle(self, drafts: int, accepted: int, cost: float) -> None:
        """A cycle of exit drafts and their verification gave ``accepted + 1`` tokens for ``cost``."""
        self.num_speculative_tokens = next_speculative_tokens(self.num_speculative_tokens, drafts, accepted)
        self.exits.observe(accepted + 1, cost)


class DraftController:
    """Decides for all sequences of an engine.

    Args:
        exits: those that may draft, shallow first; empty: none.
        predicted: the calibration's predicted speedup of exit drafts for one greedy sequence; None: unknown.
        exit_shares: checkpoint → expected share of the tokens that stop there.
        draft_head: None: there is none, or what it takes is not known.
        measured: whether ``costs`` were measured. Otherwise exits are evaluated in batches too, as their price is unknown.
    """

    def __init__(
        self,
        costs: CostModel,
        tuning: DepthTuning,
        exits: Sequence[Exit],
        predicted: float | None,
        exit_shares: Mapping[int, float],
        measured: bool,
        draft_head: DraftHeadInfo | None = None,
    ) -> None:
        self.costs, self.tuning, self.exits, self.draft_head = costs, tuning, exits, draft_head
        self.passes = ObservedPasses(costs)
        self.expected = predicted if predicted is not None else tuning.uncalibrated_speedup
        self._gate = ExitGate(costs, exits, exit_shares, False, predicted, tuning, unknown=not measured)
        self._pools = TextPools(tuning.pool_tokens)

    def start(self, params: GenerationParams) -> DraftState:
        """The state of a new sequence. A calibration predicts greedy text; fewer drafts of sampled text are accepted."""
        expected = self.expected if params.greedy else min(self.expected, self.tuning.uncalibrated_speedup)
        pool = self._pools.of(params.cache_salt) if params.use_prefix_cache else None
        head = HeadDrafts.start(self.draft_head, self.tuning) if self.draft_head is not None else None
        return DraftState(self.tuning, Backoff(self.tuning, expected), TextDrafter(pool), head=head)

    def finish(self, state: DraftState, output: Sequence[int]) -> None:
        """The sequence has ended; its ``output`` may draft for others."""
        if state.text.pool is not None:
            state.text.pool.add(output)

    def evaluates_exits(self, batch_size: int, greedy: bool) -> bool:
        """Whether exits may be evaluated at all where so many sequences run at once."""
        return bool(self.exits) and self._gate.opens(batch_size, greedy)

    def text_draft_lengths(self, states: Sequence[DraftState], evaluates_exits: bool, prompt_tokens: int = 0) -> list[int]:
        """How many tokens of its guess each sequence drafts.

        Args:
            evaluates_exits: they may draft with exits instead.
            prompt_tokens: tokens of prompts that the step runs as well.
        """
        speedup = fmean(state.exits.speedup for state in states) if evaluates_exits else 1.0
        measured_ms = self._pass_time(prompt_tokens, observed=False)
        chances = [affordable(state.ledger, state.text_chances, measured_ms, len(states)) for state in states]
        return lengths_to_verify(chances, self._pass_time(prompt_tokens), speedup, self.tuning)

    def _pass_time(self, prompt_tokens: int, before_ms: float = 0.0, observed: bool = True) -> PassTime:
        """Prices of passes.

        Args:
            before_ms: what was spent before the pass.
            observed: correct them by observed passes, for the choice of drafts. Ledgers count in measured prices, because at
                the corrected prices of a busy machine few texts can pay for their first long copy.
        """
        if not prompt_tokens:
            full = self.passes.full if observed else self.costs.full
            return lambda batch_size, tokens, longest: before_ms + full(batch_size, tokens, longest)
        return lambda batch_size, tokens, longest: before_ms + self.costs.packed(batch_size, tokens, prompt_tokens)

    def head_pays(
        self, states: Sequence[DraftState], text: Sequence[Sequence[float]], ready: Sequence[int], spent_ms: float, prompts: int
    ) -> bool:
        """Whether another guess of the draft head, or several, in the sequences at ``ready`` gives more expected tokens per ms.

        Args:
            text: of each sequence, the chances of its drafts from text, which the head's take the place of.
            spent_ms: by the guesses so far.
            prompts: tokens of prompts that the step runs as well.
        """
        batch_size, pass_ms, before = len(states), self._pass_time(prompts, spent_ms), 0.0
        heads = [head for i in ready if (head := states[i].head) is not None]
        own = [(sum(text[i]), len(text[i])) for i in ready]
        others = [chances for i, chances in enumerate(text) if i not in ready]
        expected, count = batch_size + sum(map(sum, others)), batch_size + sum(map(len, others))
        longest_other = max(map(len, others), default=0)
        last, made = [head.chances[-1] if head.tokens else 1.0 for head in heads], [sum(head.chances) for head in heads]
        rate = 0.0
        for more in range(1 + min(head.room - len(head.tokens) for head in heads)):
            if more:
                before += self.costs.draft_head(len(ready), first=not spent_ms and more == 1)
                last = [chance * head.mean.rate(0.0) for chance, head in zip(last, heads, strict=True)]
                made = [total + chance for total, chance in zip(made, last, strict=True)]
            better = [
                (total, len(head.tokens) + more) if total > value else (value, tokens)
                for total, head, (value, tokens) in zip(made, heads, own, strict=True)
            ]
            given, tokens = expected + sum(value for value, _ in better), count + sum(tokens for _, tokens in better)
            longest = 1 + max(longest_other, *(tokens for _, tokens in better))
            found = given / (pass_ms(batch_size, tokens, longest) + before)
            if more and found > rate:
                return True
            rate = max(rate, found)
        return False

    def head_price(self, batch_size: int) -> float:
        """What a first guess in every sequence and its verification take more than no guess, in passes."""
        pass_ms = self._pass_time(0, self.costs.draft_head(batch_size, first=True), observed=False)
        return pass_ms(batch_size, 2 * batch_size, 2) / self.costs.full(batch_size, batch_size, 1) - 1

    def lengths(
        self, states: Sequence[DraftState], chances: Sequence[Sequence[float]], spent_ms: float, prompt_tokens: int
    ) -> list[int]:
        """How many drafts of each sequence are verified, after ``spent_ms`` of drafting."""
        pass_ms, batch_size = self._pass_time(prompt_tokens, observed=False), len(states)
        spent = spent_ms / pass_ms(batch_size, batch_size, 1)
        paid = [affordable(state.ledger, own, pass_ms, batch_size, spent) for state, own in zip(states, chances, strict=True)]
        return lengths_to_verify(paid, self._pass_time(prompt_tokens, spent_ms), 1.0, self.tuning)

    def settle(self, states: Sequence[DraftState], drafts: Sequence[int], tokens: Sequence[int], head_ms: float) -> None:
        """A step without exits is over: enter into the ledgers what drafts cost and gave.

        Args:
            drafts: that were verified, of each sequence.
            tokens: that it got.
            head_ms: spent by the draft head.
        """
        batch_size, count = len(states), len(states) + sum(drafts)
        base = self.costs.full(batch_size, batch_size, 1)
        extra = (
            (head_ms + self.costs.full(batch_size, count, 1 + max(drafts, default=0))) / base - 1
            if head_ms or any(drafts)
            else 0.0
        )
        guessed = [
            bool(made or (state.head is not None and state.head.tokens)) for state, made in zip(states, drafts, strict=True)
        ]
        share = extra * batch_size / max(1, sum(guessed))
        for state, drafted, made in zip(states, guessed, tokens, strict=True):
            state.ledger.settle(made, share if drafted else 0.0, made - 1)

    def observe_pass(self, counts: Sequence[int], ms: float) -> None:
        """A full pass for ``counts`` tokens of each sequence took ``ms``.

        Where exits may draft instead, this changes nothing: the prices of exits are not observed, and a corrected price cannot be
        compared with one that is not corrected.
        """
        if self.tuning.observe_passes and not self.exits:
            self.passes.observe(len(counts), sum(counts), max(counts), ms)

    def sequences_to_speculate(self, ready: Sequence[int], batch_size: int) -> Sequence[int]:
        """Those of the ``ready`` sequences that evaluate exits: all or none, as a launch costs nearly as much for a few of the
        batch as for all."""
        return ready if 2 * len(ready) >= batch_size else []


def next_speculative_tokens(most: int, drafts: int, accepted: int) -> int:
    """The most exit drafts of the next cycle: doubled after all were accepted, halved after none was."""
    if accepted == drafts:
        return max(most, 2 * drafts)
    return most if accepted else max(1, most // 2)


def affordable(
    ledger: Ledger, chances: Sequence[float], pass_ms: PassTime, batch_size: int, spent: float = 0.0
) -> Sequence[float]:
    """The first of the drafts with these ``chances``, as many as the ledger can pay for if all are wrong and the other sequences
    of the batch draft as many. Certain drafts need no account. ``spent``: passes that drafting took."""
    full = pass_ms(batch_size, batch_size, 1)
    certain = sum(chance == 1 for chance in chances)
    for count in range(1 + certain, len(chances) + 1):
        if spent + pass_ms(batch_size, batch_size * (count + 1), count + 1) / full - 1 > ledger.balance:
            return chances[: count - 1]
    return chances


def lengths_to_verify(of_drafts: Sequence[Sequence[float]], pass_ms: PassTime, speedup: float, tuning: DepthTuning) -> list[int]:
    """How many drafts of each sequence of a batch are verified, for the most expected tokens per ms of the whole batch.

    Tokens are taken in the order of the probability that they are accepted, of whatever sequence, while the pass that verifies
    them all gives a better rate.

    Args:
        of_drafts: of each sequence's drafts, the probability that it and all before it are accepted.
        pass_ms: time of a pass through the whole model.
        speedup: of drafting with exits instead; 1 without.
    """
    batch_size = len(of_drafts)
    chances = []
    for place, own in enumerate(of_drafts):
        chances += [(-chance, n, place) for n, chance in enumerate(own, 1)]
    chances.sort()  # of equal ones the earlier token first: no token is drafted without those before it
    full, best, best_rate = pass_ms(batch_size, batch_size, 1), [0] * batch_size, batch_size * speedup
    if not chances:
        return best
    # Even batches may cost less than smaller uneven ones.
    least = min(pass_ms(batch_size, batch_size + 1, 2), pass_ms(batch_size, 2 * batch_size, 2))
    if (batch_size - sum(chance[0] for chance in chances)) * full <= best_rate * least:
        return best  # all guesses together would not pay for it
    penalty, shorter = tuning.padding_penalty * full / batch_size, 0.0
    for longest in tuning.draft_lengths if batch_size > 1 else tuning.draft_lengths[-1:]:
        given, lengths, seq, count = float(batch_size), [0] * batch_size, 1, batch_size
        highest = 0.0
        for negative, n, place in chances:
            if n > longest:
                continue
            given, seq, count = given - negative, max(seq, n + 1), count + 1
            lengths[place] = n
            rate = given * full / (pass_ms(batch_size, count, seq) + penalty * (batch_size * seq - count))
            if rate > highest:
                highest = rate
                if rate > best_rate:
                    best, best_rate = list(lengths), rate
        if highest < shorter:
            break
        shorter = highest
    return best
