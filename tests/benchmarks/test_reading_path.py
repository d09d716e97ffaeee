"""The count of what a step and a chat make a reader open."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reading_path import bundle_with_exit, entered_by_chat, entered_by_steps


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_a_step_enters_a_part_of_what_a_request_does(policy: str, bundle: Path) -> None:
    """A trace that misses the scheduler, or that sees loading, counts another walk than the one that is quoted."""
    steps, request = entered_by_steps(bundle_with_exit(bundle), policy)
    for step in steps:
        assert {"tide_runtime/scheduling/loop.py", "tide_runtime/scheduling/scheduler.py"} <= set(step.files)
        assert "tide_runtime/admission.py" not in step.files
        assert all(lines <= request.files[file] for file, lines in step.files.items())
        assert 0 < step.lines < request.lines
    assert "tide_runtime/admission.py" in request.files
    assert not any("load" in name or name.endswith("bundle.py") for name in request.files)


def test_one_drafter_alone_is_refused(bundle: Path) -> None:
    """Figures of `exact` would leave out the exits' or the copies' files."""
    with pytest.raises(ValueError, match="ngram drafted nothing"):
        entered_by_steps(bundle_with_exit(bundle), "exact", [[3, 1, 4]], 3)


def test_a_chat_counts_middlewares_and_not_the_engine_thread(bundle: Path) -> None:
    """Without its middlewares a chat looks shorter than what a server runs; the engine's thread is counted as a step."""
    files = entered_by_chat(bundle).files
    assert any(name.endswith("recorder.py") for name in files) and "tide_serve/api/chat.py" in files
