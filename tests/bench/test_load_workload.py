"""The requests of the load generator: their lengths, prompts and times of arrival."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.serving.load import LengthMix, requests, with_arrivals

MIX = LengthMix(prompt=(16, 900), new=(16, 96))
TEXT = list(range(20_000))


def test_prompt_lengths_are_log_uniform_within_their_range() -> None:
    """The mix would be of long prompts only, as a uniform draw is, or would leave the range that the table names."""
    lengths = MIX.draw(4000, np.random.default_rng(0))
    prompts, new = (np.array(column) for column in zip(*lengths, strict=True))
    assert 16 <= prompts.min() < 18 and 890 < prompts.max() <= 900 and (new.min(), new.max()) == (16, 96)
    assert np.median(prompts) == pytest.approx(np.sqrt(16 * 900), rel=0.1)
    assert np.mean(new) == pytest.approx(56, rel=0.05)


def test_fixed_lengths() -> None:
    """A closed loop of 64-token prompts would have prompts of 63 or 65."""
    assert set(LengthMix((64, 64), (64, 64)).draw(100, np.random.default_rng(0))) == {(64, 64)}
    assert {prompt for prompt, _ in LengthMix((1, 3), (1, 1)).draw(100, np.random.default_rng(0))} == {1, 2, 3}


@pytest.mark.parametrize("mix", [((0, 4), (1, 1)), ((5, 4), (1, 1)), ((1, 1), (2, 1))])
def test_an_empty_range_is_refused(mix: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """NumPy would answer with an error about logarithms, or with empty prompts."""
    with pytest.raises(ValueError, match="range of"):
        LengthMix(*mix)


def test_prompts_are_windows_that_begin_at_different_places() -> None:
    """Prompts with a common beginning would hit a prefix cache and call it a cold figure."""
    planned = requests(TEXT, MIX, 200, 0)
    assert len({request.prompt[0] for request in planned}) == 200
    for request in planned:
        assert request.prompt == list(range(request.prompt[0], request.prompt[0] + len(request.prompt)))


def test_the_same_seed_gives_the_same_requests() -> None:
    """Arms of one round would answer different prompts; and two rounds the same ones."""
    assert requests(TEXT, MIX, 20, [0, 1]) == requests(TEXT, MIX, 20, [0, 1])
    assert requests(TEXT, MIX, 20, [0, 1]) != requests(TEXT, MIX, 20, [0, 2])


def test_a_short_text_is_refused() -> None:
    """Prompts would be shorter than asked for."""
    with pytest.raises(ValueError, match="need more"):
        requests(TEXT[:910], MIX, 20, 0)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    """The load would be another one than the table says, or regular, which no queue minds."""
    planned = with_arrivals(requests(TEXT, MIX, 4000, 0), rate=8.0, seed=1)
    times = np.array([request.arrival_s for request in planned])
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05) and gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert [request.prompt for request in planned[:5]] == [request.prompt for request in requests(TEXT, MIX, 4000, 0)[:5]]
