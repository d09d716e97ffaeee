"""The record of a sequence: what is guessed and drafted in this step, how often guesses were right, and whether exits paid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.depth.frontier import LazySequence
from tide_runtime.depth.tuning import DepthTuning


class Guess(NamedTuple):
    """``tokens`` likely to follow a text, and the ``evidence`` for each: matched tokens before it, a draft head's score, or a
    package's probability. Those that a grammar forces need none."""

    tokens: Sequence[int]
    evidence: Sequence[float]
    source: str


NO_GUESS = Guess((), (), "ngram")


class HitRates:
    """A running rate for each class of evidence in one sequence.

    Args:
        weight: outcomes that the usual rate of a class counts as.
        memory: outcomes of a class over which its rate is averaged; older ones count ever less.
        usual: least evidence of a class → its usual rate, rising.
    """

    def __init__(self, weight: float, memory: float, usual: Mapping[float, float]) -> None:
        self._decay = 1 - 1 / memory
        self._weight = weight
        self._min_evidence, self._usual = list(usual), list(usual.values())
        self._hits, self._tries = [0.0] * len(self._usual), [0.0] * len(self._usual)

    def rate(self, evidence: float) -> float:
        """Probability that a token with this ``evidence`` is right."""
        index = self._class_of(evidence)
        return (self._hits[index] + self._weight * self._usual[index]) / (self._tries[index] + self._weight)

    def chances(self, evidence: Sequence[float]) -> list[float]:
        """Probability of each of consecutive tokens that it and all before it are right."""
        chance = 1.0
        chances = []
        for one in evidence:
            chance *= self.rate(one)
            chances.append(chance)
        return chances

    def observe(self, guessed: Sequence[int], evidence: Sequence[float], tokens: Sequence[int]) -> None:
        """``tokens`` followed where these were ``guessed``. Guesses after the first wrong one tell nothing."""
        for guess, one, token in zip(guessed, evidence, tokens, strict=False):
            index = self._class_of(one)
            self._hits[index] = self._decay * self._hits[index] + (guess == token)
            self._tries[index] = self._decay * self._tries[index] + 1
            if guess != token:
                break

    def _class_of(self, evidence: float) -> int:
        return max(0, bisect_right(self._min_evidence, evidence) - 1)


@dataclass
class Backoff:
    """A running speedup of exits in one sequence, and cooldowns after they lost, longer each time. Costs are in full-depth
    decode steps of one token.

    Args:
        expected: the speedup expected at first and after a cooldown.
        weight: outcomes that the expectation counts as.
    """

    tuning: DepthTuning
    expected: float
    weight: float = 1.0
    tokens: float = field(init=False)
    cost: float = field(init=False)
    cooldown: float = 0  # tokens until speculation is tried again
    next_cooldown: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_cooldown = self.tuning.cooldown
        self._expect()

    @property
    def active(self) -> bool:
        """Whether speculation is tried now."""
        return self.cooldown == 0

    @property
    def speedup(self) -> float:
        """Tokens over those that full-depth decoding makes in the same time; 1 during a cooldown."""
        return self.tokens / self.cost if self.active else 1.0

    def observe(self, tokens: float, cost: float) -> None:
        """Speculation gave ``tokens`` for ``cost``."""
        tuning = self.tuning
        self.tokens, self.cost = tuning.backoff_decay * self.tokens + tokens, tuning.backoff_decay * self.cost + cost
        if self.tokens < self.cost:
            self.cooldown = self.next_cooldown
            self.next_cooldown *= 2
            self._expect()
        elif self.tokens > tuning.uncalibrated_speedup * self.cost:
            self.next_cooldown = tuning.cooldown

    def pass_tokens(self, tokens: float) -> None:
        """``tokens`` were generated without speculation."""
        self.cooldown = max(0.0, self.cooldown - tokens)

    def _expect(self) -> None:
        self.tokens = self.weight * self.expected
        self.cost = self.weight


def exit_backoff(tuning: DepthTuning) -> Backoff:
    """The record of policy ``exit``, which observes every token."""
    return Backoff(tuning, tuning.uncalibrated_speedup, tuning.exit_expectation_weight)


class TrackRecord:
    """How good the drafts of one sequence were.

    Args:
        expected: speedup expected of exit drafts.
        head: what the calibration measured of the draft head; None: there is none.
        package: name of a package's drafter, whose evidence is a probability; None: there is none.

    Attributes:
        rates: of guesses, by source.
        head_first: acceptance of the head's first token, over all scores.
        exits: whether exit drafts pay.
        num_exit_drafts: most exit drafts of the next cycle.
    """

    def __init__(
        self, tuning: DepthTuning, expected: float = 1.0, head: DraftHeadInfo | None = None, package: str | None = None
    ) -> None:
        weight, memory = tuning.hit_rate_weight, tuning.hit_rate_memory
        self.rates = {
            "ngram": HitRates(weight, memory, dict(tuning.usual_hit_rates)),
            "successor": HitRates(weight, memory, dict(tuning.usual_successor_rates)),
        }
        if head is not None:
            self.rates["head"] = HitRates(weight, memory, {score: share for score, share in head.classes})
        if package is not None:
            self.rates[package] = HitRates(weight, memory, {n / 8: (n + 0.5) / 8 for n in range(8)})
        self._acceptance = head.acceptance if head is not None else [0.0]
        self.head_first = HitRates(weight, memory, {0.0: self._acceptance[0]})
        self.exits = Backoff(tuning, expected)
        self.num_exit_drafts = tuning.first_exit_drafts

    def chances(self, guess: Guess) -> list[float]:
        """Probability, for each guessed token, that it and all tokens before it are right."""
        tokens, evidence, source = guess
        return self.rates[source].chances(evidence[: len(tokens)]) if source in self.rates else [1.0] * len(tokens)

    def head_chances(self, chances: list[float], more: int) -> list[float]:
        """``chances`` of the draft head's guesses, and of ``more`` after them."""
        rates = [self.head_first.rate(0.0), *self._acceptance[1:]]
        for place in range(len(chances), len(chances) + more):
            chances = [*chances, rates[min(place, len(rates) - 1)] * (chances[-1] if chances else 1.0)]
        return chances

    def best(self, *guesses: Guess) -> tuple[Guess, list[float]]:
        """The guess of which most tokens are expected to be right, the first of equals, and its chances."""
        return max(((guess, self.chances(guess)) for guess in guesses), key=lambda known: sum(known[1]))

    def observe(self, guess: Guess, tokens: Sequence[int]) -> None:
        """``tokens`` followed where ``guess`` was made, whether or not it was drafted."""
        guessed, evidence, source = guess
        if source in self.rates:
            self.rates[source].observe(guessed, evidence, tokens)
        if source == "head":
            self.head_first.observe(guessed[:1], evidence, tokens)

    def observe_cycle(self, drafts: int, accepted: int, cost: float) -> None:
        """A cycle of exit drafts and their verification gave ``accepted + 1`` tokens for ``cost``."""
        self.num_exit_drafts = next_exit_drafts(self.num_exit_drafts, drafts, accepted)
        self.exits.observe(accepted + 1, cost)


def next_exit_drafts(most: int, drafts: int, accepted: int) -> int:
    """The most exit drafts of the next cycle: doubled after all were accepted, halved after none was."""
    if accepted == drafts:
        return max(most, 2 * drafts)
    return most if accepted else max(1, most // 2)


class Draft(NamedTuple):
    """A proposed token; ``source``: "router" for one that an exit head chose after ``depth`` layers, "ngram" for a copied one,
    "successor" for one of earlier replies, "grammar" for one that a grammar forces, "head" for the draft head's."""

    token: int
    source: str
    depth: int


@dataclass
class SpeculativeSequence(LazySequence):
    """A sequence for which tokens are drafted. Full passes leave its frontier where it was.

    Args:
        record: how good drafts were so far.
        history, successors, head: what the drafters from the text and from earlier replies, and the draft head, keep, in types of
            their own.
        guess: of the text drafter or the grammar, in this step.
        successor_guess: from earlier replies, in this step.
        head_guess: of the draft head, in this step.
        head_room: most tokens that the draft head may guess in this step; 0: it does not.
        drafts: the tokens after the output that this step verifies.
        evaluates: whether exits draft for the sequence in this step.
    """

    record: TrackRecord = field(kw_only=True)
    history: Any = None
    successors: Any = None
    head: Any = None
    guess: Guess = NO_GUESS
    successor_guess: Guess = NO_GUESS
    head_guess: Guess = NO_GUESS
    head_room: int = 0
    drafts: list[Draft] = field(default_factory=list)
    evaluates: bool = False

    def begin_step(self) -> None:
        """Nothing is guessed or drafted yet."""
        self.guess = self.successor_guess = self.head_guess = NO_GUESS
        self.head_room = 0
        self.evaluates = False
        self.drop_drafts()

    def place(self, token: int, source: str, depth: int = 0) -> None:
        """Put a draft after the sequence's tokens and drafts."""
        self.tokens[self.num_tokens_with_drafts] = token
        self.num_drafts += 1
        self.drafts.append(Draft(token, source, depth))

    def drop_drafts(self) -> None:
        self.drafts = []
        self.num_drafts = 0

    def best_guess(self) -> tuple[Guess, list[float]]:
        """The guess of which most tokens are expected to be right, and its chances. Where the draft head's begins like the best
        copy, it is the copy, because the two confirm each other and a copy goes further."""
        copy, chances = self.record.best(self.guess, self.successor_guess)
        alike = copy.tokens and self.head_guess.tokens and copy.tokens[0] == self.head_guess.tokens[0]
        head = self.record.chances(self.head_guess)
        return (copy, chances) if alike or sum(chances) >= sum(head) else (self.head_guess, head)

    def chances_after(self, more: int) -> list[float]:
        """Chances of the best guess once the draft head has guessed ``more`` tokens, if it does."""
        _, chances = self.best_guess()
        if not self.head_room or not more:
            return chances
        return max(chances, self.record.head_chances(self.record.chances(self.head_guess), more), key=sum)
