"""How a row's drafting adapts: which drafter is worth its cost just now, and how far ahead it should go.

The n-gram drafter is judged without being used: its guess is held against what came, so it is taken up as soon as the
text repeats. Asking exits costs, so they are on trial (`Trial`), and draft few tokens until the first ones were right. Of several
exits each one is on trial against the next: is it worth asking, or better passed by?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tide_runtime.drafting.backoff import Trial
from tide_runtime.drafting.ngram import NgramDrafter

FIRST_REACH = 1  # drafts of the first cycle
FIRST_HIT_RATE = 0.5  # of n-gram guesses, per token, before any was seen
HIT_WEIGHT = 0.15  # of the newest token in it
_EARLY = 1.5  # gain expected at first of asking an exit that has others behind it: the calibration chose it
_LENGTHS = (1, 2, 3, 4, 6, 9, 64)  # most tokens that one row copies: rows of a batch wait for the longest of them
_PATIENCE = 8  # tokens that may be added to a pass without a better rate: steps are rounded up
_LEAST_CHANCE = 0.05  # of a token to be right; less pays nowhere
# Of a row's plain step, for each slot that pads a shorter row, besides what it costs. Long drafts of one row are dear in the end:
# it gets ahead, and what it would have copied later, together with others, is gone.
_AHEAD = 0.05


@dataclass
class DraftControl:
    """The state of one row. ``guess``: what the n-gram drafter would say next."""

    exits: Trial
    ngram: NgramDrafter = field(default_factory=NgramDrafter)
    guess: list[int] = field(default_factory=list)
    hit_rate: float = FIRST_HIT_RATE
    reach: int = FIRST_REACH  # most tokens that exits draft in the next cycle
    early: list[Trial] = field(default_factory=list)  # of asking each exit but the last, where a draft from the next one costs 1

    def passes_by(self, exit: int) -> bool:
        """Whether the next draft goes by the exit of that number without asking it; counts as a token of its rest."""
        if exit >= len(self.early) or self.early[exit].asks:
            return False
        self.early[exit].rest(1)
        return True

    def saw(self, exit: int, drafts: int, cost: float) -> None:
        """Asking an exit gave so many drafts that were right for ``cost``."""
        if exit < len(self.early):
            self.early[exit].saw(drafts, cost)

    def learn(self, tokens: list[int]) -> None:
        """Hold the guess against the ``tokens`` that came."""
        for guessed, token in zip(self.guess, tokens, strict=False):
            hit = guessed == token
            self.hit_rate += HIT_WEIGHT * (hit - self.hit_rate)
            if not hit:
                break


def early_trials(exits: int) -> list[Trial]:
    """For so many exits."""
    return [Trial(_EARLY) for _ in range(exits - 1)]


def next_reach(reach: int, drafts: int, accepted: int) -> int:
    """``reach`` after a cycle of so many drafts, of which so many were accepted: further after all, less far after none."""
    if accepted == drafts:
        return max(reach, 2 * drafts)
    return reach if accepted else max(1, reach // 2)


def copy_lengths(
    controls: Sequence[DraftControl], pass_ms: Callable[[int, int, int], float], gain: float, worth: Sequence[float] | None = None
) -> list[int]:
    """How many tokens of its guess each row of a batch copies, for the best expected rate of all rows together.

    The n-th token of a guess is confirmed with probability hit_rate ** n, so tokens are taken in the order of these times what a
    token is worth, of whatever row, as long as the pass that checks them all gives more for its time (and for the padding of
    shorter rows, see `_AHEAD`). None are where plain decoding, or the exits, do better.

    Args:
        gain: tokens that drafting with exits gives in the time of one plain token; 1 without.
        pass_ms: what a pass through the whole model takes for so many rows, tokens in all, and tokens of the longest row.
        worth: of a token in each row (see `row_worth`); None: the same in all.
    """
    rows = len(controls)
    worth = worth or [1.0] * rows
    chances = []
    for row, control in enumerate(controls):
        chance = 1.0
        for n in range(1, len(control.guess) + 1):
            chance *= control.hit_rate
            if chance < _LEAST_CHANCE:
                break
            chances.append((-worth[row] * chance, n, row))
    chances.sort()  # of equal ones the earlier token first: a row copies no token without those before it
    plain, best, best_gain = pass_ms(rows, rows, 1), [0] * rows, rows * gain
    if not chances:
        return best
    least = min(pass_ms(rows, rows + 1, 2), pass_ms(rows, 2 * rows, 2))  # even rows may cost less than fewer uneven ones
    if (rows - sum(chance[0] for chance in chances)) * plain <= best_gain * least:
        return best  # all guesses together would not pay for it
    ahead, shorter = _AHEAD * plain / rows, 0.0
    for longest in _LENGTHS if rows > 1 else _LENGTHS[-1:]:
        given, lengths, seq, count = float(rows), [0] * rows, 1, rows
        highest, reached = 0.0, rows  # best rate at this length, and how many tokens gave it
        for negative, n, row in chances:
            if n > longest:
                continue
            given, seq, count = given - negative, max(seq, n + 1), count + 1
            lengths[row] = n
            rate = given * plain / (pass_ms(rows, count, seq) + ahead * (rows * seq - count))
            if rate > highest:
                highest, reached = rate, count
                if rate > best_gain:
                    best, best_gain = list(lengths), rate
            elif count - reached >= _PATIENCE:  # chances only fall from here on
                break
        if highest < shorter:
            break
        shorter = highest
    return best
