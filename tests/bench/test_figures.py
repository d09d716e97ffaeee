"""Ratios, agreement and energy of the arms, on synthetic runs."""

from dataclasses import replace

import pytest
from bench.synthetic_runs import turn
from tide_bench.config import BenchConfig
from tide_bench.figures import decode_seconds, ratio_row, settled, speed_row, text_row
from tide_bench.paired_ratio import chained_ratio


def test_ratio_pairs_turns_at_the_same_prompts() -> None:
    """A slow moment of the machine would look like a slow arm."""
    turns = {"unsplit": [turn(2, 0), turn(20, 1)], "full": [turn(1, 0), turn(10, 1)]}
    row = ratio_row("full", turns, decode_seconds, BenchConfig())
    assert row["vs_unsplit"] == row["vs_unsplit_low"] == row["vs_unsplit_high"] == 2


def test_arms_that_never_met_are_compared_over_full() -> None:
    """A model too large for all arms at once would have no ratios, or such of different times of the day."""
    turns = {
        "full": [turn(1, 0, meeting=0), turn(10, 0, meeting=1)],
        "unsplit": [turn(2, 0, meeting=0)],
        "genai": [turn(5, 0, meeting=1)],
    }
    row = ratio_row("genai", turns, decode_seconds, BenchConfig())
    assert row["vs_unsplit"] == pytest.approx(4)  # twice full, which is twice unsplit


def test_chained_ratio_is_as_unsure_as_both_its_parts() -> None:
    """An interval would leave out that the baseline's own figure is unsure."""
    one, other = [(2.0, 1.0)] * 9, [(1.0, 1.0), (1.0, 2.0), (1.0, 0.5)] * 3
    ratio = chained_ratio(one, other)
    assert ratio.median == 2 and ratio.low < 2 < ratio.high


def test_a_row_says_what_ran_in_place_of_what_its_name_says() -> None:
    """Tables showed the speed of `exact` where the engine runs `full`."""
    limited = turn(1)
    limited = replace(limited, timing=replace(limited.timing, limitation="policy exact runs as full"))
    assert speed_row("TIDE exact", [limited], decode_seconds)["title"] == "TIDE exact (policy exact runs as full)"
    assert speed_row("TIDE exact", [turn(1)], decode_seconds)["title"] == "TIDE exact"


def test_agreement_holds_texts_of_the_same_round_together() -> None:
    """An arm that stopped early would be compared with texts of other prompts."""
    full = [turn(1, 0, tokens=[[1, 2, 3]]), turn(1, 1, tokens=[[4, 5, 6]])]
    assert text_row([turn(1, 1, tokens=[[4, 5, 6]])], full) == {"agreement": 1.0, "identical": 1.0}
    assert text_row([turn(1, 1, tokens=[[4, 9, 6]])], full)["agreement"] == 0


def test_settled_is_what_every_ratio_has_to_be() -> None:
    """Turns would end while one arm's figure is still a guess."""
    steady = {"eager": [turn(2, n) for n in range(6)], "full": [turn(1, n) for n in range(6)]}
    wavering = steady | {"exit": [turn(1 + n % 3, n) for n in range(6)]}
    assert settled(steady, decode_seconds, BenchConfig()) and not settled(wavering, decode_seconds, BenchConfig())
    assert not settled({"full": steady["full"]}, decode_seconds, BenchConfig())  # no baseline: nothing is known
