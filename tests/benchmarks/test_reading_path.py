"""The count of files behind a token."""

from __future__ import annotations

import pytest

from benchmarks.reading_path import BUNDLE, PROMPTS, TOKENS, executed_files


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_files_of_a_step_are_among_those_of_a_request(policy: str) -> None:
    """A trace that misses the scheduler, or that sees loading, counts another walk than the one that is quoted."""
    request, steps = (files.lines() for files in executed_files(BUNDLE, policy, PROMPTS, TOKENS))
    assert set(steps) < set(request)
    assert {"tide_runtime/scheduling/loop.py", "tide_runtime/scheduling/scheduler.py"} <= set(steps)
    assert not any("load" in name or "manifest" in name for name in request)
    assert all(lines > 0 for lines in request.values())


def test_one_drafter_alone_is_refused() -> None:
    """Figures of `exact` would leave out the exits' or the n-grams' files."""
    with pytest.raises(ValueError, match="expected ngram and router"):
        executed_files(BUNDLE, "exact", [PROMPTS[0]], 3)
