"""Who runs when."""

from itertools import pairwise

import pytest
from bench.synthetic_runs import FakeProcess, spec
from tide_bench import rounds as module
from tide_bench.arm_pool import RunningArm, meetings

GROUPS = [[[1]]] * 5
NEVER = lambda turns: False  # noqa: E731


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0)


def _entries(calls: list[str], **fails_at: int | None) -> list[RunningArm]:
    return [RunningArm(spec(n), FakeProcess(calls, n, at)) for n, at in fails_at.items()]  # type: ignore[arg-type]


def test_arms_take_turns_and_follow_different_ones(tmp_path) -> None:
    """All runs of one arm would stand together, and a slow minute hit one arm only; or one always come after the loudest."""
    calls: list[str] = []
    entries = _entries(calls, a=None, b=None, c=None)
    own = module.run_rounds(entries, GROUPS, 2, 9, 0, lambda *_: None, NEVER)
    rounds = [calls[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(arms) == ["a", "b", "c"] for arms in rounds)
    assert {before for before, after in pairwise(calls) if after == "a" and before != "a"} == {"b", "c"}
    assert [turn.round for turn in own["a"]] == [0, 1, 2, 3, 4]


def test_time_that_is_up_ends_the_turns_but_for_the_fewest(tmp_path) -> None:
    """A comparison of six minutes would take an hour on a slow machine, or show an interval of one turn."""
    own = module.run_rounds(_entries([], a=None), GROUPS, 2, 0, 0, lambda *_: None, NEVER)
    assert len(own["a"]) == module.FEWEST_ROUNDS


def test_turns_end_once_they_are_settled(tmp_path) -> None:
    """A quiet machine would be kept busy for a figure that is known, or a loud one stopped after a lucky turn."""
    settled = lambda turns: len(turns["a"]) >= 2  # noqa: E731
    own = module.run_rounds(_entries([], a=None), GROUPS, 2, 9, 0, lambda *_: None, settled)
    assert len(own["a"]) == module.FEWEST_ROUNDS


def test_an_arm_that_fails_leaves_the_others_running(tmp_path) -> None:
    """One library's crash would end the benchmark."""
    failed: list[tuple[str, str]] = []
    entries = _entries([], a=None, b=2)
    own = module.run_rounds(entries, GROUPS[:3], 2, 9, 0, lambda c, why: failed.append((c.name, why)), NEVER)
    assert failed == [("b", "out of memory")] and len(own["a"]) == 3 and len(own["b"]) == 1


def test_every_kind_is_in_memory_with_the_first_one() -> None:
    """Arms of a model that does not fit several times would have no common measure."""
    assert meetings(["tide", "eager", "unsplit", "genai"], 9) == [["tide", "eager", "unsplit", "genai"]]
    assert meetings(["tide", "eager", "unsplit", "genai"], 3) == [["tide", "eager", "unsplit"], ["tide", "genai"]]
    assert meetings(["tide"], 2) == [["tide"]]
