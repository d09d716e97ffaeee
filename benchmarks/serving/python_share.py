"""The share of decode steps that is spent outside ONNX Runtime's sessions: the engine's own Python, and that of its callers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from unittest.mock import patch

import onnxruntime as ort


@dataclass(frozen=True)
class SessionRun:
    """One run of one session; times in seconds."""

    session: int
    begin: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """``step_ms``: a decode step; ``python_ms``: its time outside sessions."""

    step_ms: float
    python_ms: float

    @property
    def python_pct(self) -> float:
        return 100 * self.python_ms / self.step_ms


@contextmanager
def watched_sessions() -> Iterator[list[SessionRun]]:
    """The list gets every session run of this process; noting one costs a microsecond."""
    runs: list[SessionRun] = []
    run = ort.InferenceSession.run_with_iobinding

    def timed(session: ort.InferenceSession, *args: object) -> None:
        begin = perf_counter()
        run(session, *args)
        runs.append(SessionRun(id(session), begin, perf_counter()))

    with patch.object(ort.InferenceSession, "run_with_iobinding", timed):
        yield runs


def decode_step_time(runs: Sequence[SessionRun]) -> StepTime:
    """Steps in the second half of ``runs``' time, when sequences that began together have only decode steps left.

    A step ends where its last session ends: it runs each session once, one after the other. Raises ValueError for fewer than 2
    such steps, and for sessions that ran at the same time.
    """
    ordered = sorted(runs, key=lambda one: one.begin)
    middle = (ordered[0].begin + ordered[-1].end) / 2 if ordered else 0.0
    last = ordered[-1].session if ordered else 0
    ends = [i for i, one in enumerate(ordered) if one.session == last and one.begin >= middle]
    if len(ends) < 2:
        raise ValueError(f"{len(ends)} decode steps were seen; give requests of more new tokens")
    if any(after.begin < before.end for before, after in pairwise(ordered)):
        raise ValueError("sessions ran at the same time, so their steps are not one loop's")
    seconds = ordered[ends[-1]].end - ordered[ends[0]].end
    inside = sum(one.end - one.begin for one in ordered[ends[0] + 1 : ends[-1] + 1])
    steps = len(ends) - 1
    return StepTime(1e3 * seconds / steps, 1e3 * (seconds - inside) / steps)
