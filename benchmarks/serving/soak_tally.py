"""Whether the answers of a soak are right, and what became of its requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime.outputs import Generation

from benchmarks.serving.soak_plan import SoakRequest

ABORTED = ("cancelled", "deadline")


@dataclass(frozen=True)
class Expected:
    """The text of a request that runs alone."""

    token_ids: tuple[int, ...]
    finish_reason: str


def is_right(done: Generation, chunks: Sequence[int] | None, expected: Expected, cancelled: bool = False) -> bool:
    """Whether an answer is its text alone: all of it, or its beginning where the caller or the deadline has ended it.

    Args:
        chunks: the tokens that were streamed, which must be the answer's; None: it was not streamed.
        cancelled: the caller has cancelled, maybe too late. It may miss the last tokens of the answer.
    """
    tokens = tuple(done.token_ids)
    if chunks is not None and tokens[: len(chunks)] != tuple(chunks):
        return False
    if done.finish_reason in ABORTED:
        return tokens == expected.token_ids[: len(tokens)]
    whole = cancelled or chunks is None or len(chunks) == len(tokens)
    return whole and (tokens, done.finish_reason) == (expected.token_ids, expected.finish_reason)


class Tally:
    """What became of the requests; callers note it from any thread.

    ``outcomes``: finish reason, ``wrong``, ``error`` or ``refused`` (by a full queue, to be sent again) → requests.
    ``failures``: the first few wrong texts and errors, in words.
    """

    def __init__(self, expected: Sequence[Expected]) -> None:
        self._expected, self._lock = expected, threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.answered = 0

    def note(self, request: SoakRequest, done: Generation, chunks: Sequence[int] | None) -> None:
        right = is_right(done, chunks, self._expected[request.text], request.cancel_after is not None)
        with self._lock:
            self.answered += 1
            self.outcomes[done.finish_reason] += 1
            if not right:
                self._fail("wrong", f"{request}: {done.token_ids} ({done.finish_reason}), streamed {chunks}")

    def note_error(self, request: SoakRequest, error: Exception) -> None:
        with self._lock:
            self.answered += 1
            self._fail("error", f"{request}: {type(error).__name__}: {error}")

    def note_refused(self) -> None:
        with self._lock:
            self.outcomes["refused"] += 1

    def _fail(self, outcome: str, words: str) -> None:
        self.outcomes[outcome] += 1
        if len(self.failures) < 10:
            self.failures.append(f"{outcome}: {words}")
