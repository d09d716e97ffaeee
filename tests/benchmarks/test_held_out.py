"""Prompts of the benchmarks: windows that do not overlap and come from as many files as there are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.held_out import held_out_prompts, spread_windows
from examples.demo_data import MIN_FILES


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 64))
def test_windows_fit_and_do_not_overlap(lengths: list[int], count: int, width: int) -> None:
    """Two prompts would share text, or run over a file's end."""
    if count > sum(length // width for length in lengths):
        with pytest.raises(ValueError, match="at most"):
            spread_windows(lengths, count, width)
        return
    places = spread_windows(lengths, count, width)
    assert len(places) == count
    taken = {(i, offset + k) for i, offset in places for k in range(width)}
    assert len(taken) == count * width
    assert all(0 <= offset <= lengths[i] - width for i, offset in places)


def test_no_file_gives_more_than_another_that_has_room() -> None:
    """One long file would decide the benchmark."""
    shares = Counter(i for i, _ in spread_windows([1000, 64, 1000, 30], 9, 64))
    assert shares == {0: 4, 1: 1, 2: 4}


def test_the_first_windows_come_from_different_files() -> None:
    """A short run, or one batch, would see one file only."""
    assert [i for i, _ in spread_windows([640] * 5, 10, 64)][:5] == [0, 1, 2, 3, 4]
    assert [i for i, _ in spread_windows([640] * 10, 2, 64)] == [0, 5]  # not the first two of the alphabet


def test_demo_prompts_are_the_files_tokens() -> None:
    """Prompts would not be the text of the files, or would change between runs."""
    prompts = held_out_prompts(30, 64, "demo")
    assert prompts == held_out_prompts(30, 64, "demo")
    assert {len(prompt.ids) for prompt in prompts} == {64}
    assert len({prompt.file for prompt in prompts}) >= MIN_FILES
