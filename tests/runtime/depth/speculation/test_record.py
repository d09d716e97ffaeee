"""The record of a sequence: how often guesses were right, and whether exits pay."""

from tide_runtime.depth.speculation.record import Backoff, HitRates
from tide_runtime.depth.tuning import DepthTuning


def rates_of_copies(weight: float, memory: float) -> HitRates:
    return HitRates(weight, memory, dict(DepthTuning().usual_hit_rates))


def test_longer_matches_are_expected_to_hold_more_often() -> None:
    """Breaks: long drafts behind a single word that happens to recur."""
    rates = rates_of_copies(8, 100)
    assert 0 < rates.rate(1) < rates.rate(3) < rates.rate(8) < rates.rate(100) < 1


def test_a_sequence_learns_what_its_matches_are_worth() -> None:
    """Breaks: texts that repeat although texts seldom do, and lists whose entries begin alike and go on differently."""
    rates = rates_of_copies(4, 10)
    before = rates.rate(2)
    for _ in range(20):
        rates.observe([5], [2], [5, 6])
    assert rates.rate(2) > before
    for _ in range(40):
        rates.observe([5], [2], [4])
    assert rates.rate(2) < before / 2


def test_each_token_behind_a_match_is_of_a_longer_one() -> None:
    """Breaks: the second token of a draft would be taken for as doubtful as the first."""
    rates = rates_of_copies(8, 100)
    first, second, third = rates.chances(range(1, 4))
    assert first == rates.rate(1) and second == first * rates.rate(2) and third == second * rates.rate(3)


def test_tokens_behind_a_wrong_one_count_nothing() -> None:
    """Breaks: chance agreement behind a refused draft would be taken for its acceptance."""
    rates, same = rates_of_copies(8, 100), rates_of_copies(8, 100)
    rates.observe([1, 2, 3], [2, 3, 4], [1, 9, 3])
    same.observe([1, 2], [2, 3], [1, 9])
    assert [rates.rate(n) for n in range(1, 9)] == [same.rate(n) for n in range(1, 9)]


def test_scores_have_classes_of_their_own() -> None:
    """Breaks: a draft head that is seldom sure would be trusted, or one that is sure would not be."""
    rates = HitRates(4, 10, {0.0: 0.1, 0.5: 0.7})
    assert rates.rate(0.49) == 0.1 and rates.rate(0.5) == rates.rate(0.99) == 0.7
    rates.observe([3, 4], [0.9, 0.2], [3, 5])
    assert rates.rate(0.6) > 0.7 and rates.rate(0.3) < 0.1


LOSS, GAIN = (1.0, 1.5), (3.0, 1.5)  # tokens, cost


def backoff() -> Backoff:
    return Backoff(DepthTuning(), expected=1.0)


def cooldowns(record: Backoff, outcomes: list[tuple[float, float]]) -> list[float]:
    """The cooldowns that ``outcomes`` lead to; each one is waited for."""
    found = []
    for tokens, cost in outcomes:
        record.observe(tokens, cost)
        if not record.active:
            found.append(record.cooldown)
            record.pass_tokens(record.cooldown)
    return found


def test_cooldowns_grow_while_speculation_loses() -> None:
    """Guards against endless retries on hopeless text; each costs up to half a step."""
    assert cooldowns(backoff(), [LOSS] * 6) == [32, 64, 128, 256, 512, 1024]


def test_a_clear_gain_resets_the_next_cooldown() -> None:
    """Guards against giving up for good on a text whose easy parts come late."""
    record = backoff()
    assert cooldowns(record, [LOSS, LOSS, LOSS, GAIN]) == [32, 64, 128]
    assert cooldowns(record, [LOSS] * 9)[0] == 32


def test_speculation_that_pays_goes_on() -> None:
    """Guards against a single loss among gains ending it."""
    assert cooldowns(backoff(), [GAIN, GAIN, LOSS, GAIN, LOSS, GAIN]) == []
