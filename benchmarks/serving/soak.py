"""A soak: texts whose tokens are known, requests for them that callers abort, delay and prefer, and what became of each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np
from tide_runtime import Engine, GenerationParams
from tide_runtime.errors import QueueFullError
from tide_runtime.outputs import Generation

POLICIES = ("full", "exact")
SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, (24, 48)
QUESTION_TOKENS, NEW_TOKENS = (1, 24), (1, 40)
SALTS = (None, "tenant a", "tenant b")
DEADLINE_S = (0.0005, 0.2)


@dataclass(frozen=True)
class PoolText:
    """One distinct generation: its prompt in token ids, and how it is generated."""

    prompt: tuple[int, ...]
    params: GenerationParams


@dataclass(frozen=True)
class SoakRequest:
    """A request for the text number ``text`` of the pool.

    Args:
        cancel_after: the caller cancels when it has so many tokens, 0: at once; None: never.
        timeout: the request's deadline in seconds; None: it has none.
        streamed: whether the caller takes token by token, or the result alone.
    """

    text: int
    policy: str
    priority: int
    salt: str | None
    use_prefix_cache: bool
    streamed: bool
    cancel_after: int | None
    timeout: float | None

    def params(self, text: PoolText) -> GenerationParams:
        return replace(text.params, cache_salt=self.salt, use_prefix_cache=self.use_prefix_cache)


def first_turns(count: int, vocabulary: int, seed: int) -> list[PoolText]:
    """``count`` texts: three of four begin with one of a few system prompts, every third is sampled with a seed of its own, every
    other one ends at an end-of-sequence token. Ids 0 and 1 are special and do not occur in prompts."""
    random = np.random.default_rng(seed)
    systems = [_ids(random, vocabulary, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    texts = []
    for number in range(count):
        system = systems[int(random.integers(SYSTEM_PROMPTS))] if number % 4 else ()
        prompt = system + _ids(random, vocabulary, QUESTION_TOKENS)
        texts.append(PoolText(prompt, _params(random, number)))
    return texts


def second_turns(
    first: Sequence[PoolText], answers: Sequence[Sequence[int]], count: int, vocabulary: int, longest: int, seed: int
) -> list[PoolText]:
    """``count`` texts whose prompts are a first turn, its answer and a new question, as in a chat; none has more than ``longest``
    tokens in all. Raises ValueError when too few first turns are short enough."""
    random = np.random.default_rng(seed)
    texts = list[PoolText]()
    for number in random.permutation(len(first)).tolist():
        params = _params(random, len(texts))
        prompt = (*first[number].prompt, *answers[number], *_ids(random, vocabulary, QUESTION_TOKENS))
        if len(texts) < count and len(prompt) + params.max_new_tokens <= longest:
            texts.append(PoolText(prompt, params))
    if len(texts) < count:
        raise ValueError(f"{len(texts)} first turns leave room for a second one in {longest} tokens, {count} are wanted")
    return texts


def soak_requests(count: int, texts: Sequence[PoolText], seed: int) -> list[SoakRequest]:
    """Requests at random: one in eight is cancelled, one in eight has a deadline that many miss, one in ten bypasses the prefix
    cache."""
    random = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        number, kind = int(random.integers(len(texts))), random.random()
        cancelled = kind < 1 / 8
        deadline = float(np.exp(random.uniform(*np.log(DEADLINE_S)))) if 1 / 8 <= kind < 1 / 4 else None
        requests.append(
            SoakRequest(
                text=number,
                policy=POLICIES[int(random.integers(2))],
                priority=int(random.integers(3)),
                salt=SALTS[int(random.integers(len(SALTS)))],
                use_prefix_cache=bool(random.random() >= 0.1),
                streamed=cancelled or bool(random.integers(2)),
                cancel_after=int(random.integers(texts[number].params.max_new_tokens + 1)) if cancelled else None,
                timeout=deadline,
            )
        )
    return requests


def _ids(random: np.random.Generator, vocabulary: int, length: tuple[int, int]) -> tuple[int, ...]:
    return tuple(random.integers(2, vocabulary, int(random.integers(length[0], length[1] + 1))).tolist())


def _params(random: np.random.Generator, number: int) -> GenerationParams:
    params = GenerationParams(max_new_tokens=int(random.integers(NEW_TOKENS[0], NEW_TOKENS[1] + 1)), ignore_eos=bool(number % 2))
    if number % 3:
        return params
    top_p, top_k = ((0.95, 0), (1.0, 20), (1.0, 0))[number // 3 % 3]
    return replace(params, temperature=0.7 + 0.1 * (number % 5), top_p=top_p, top_k=top_k, seed=number)


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


ANSWER_S = 120.0  # without an answer for so long, a request is lost
_REFUSED_S = 0.002  # until a caller tries again


class Callers:
    """``threads`` threads and ``tasks`` asyncio tasks, on engines by policy, that send requests for ``texts``."""

    def __init__(
        self, engines: Mapping[str, Engine], texts: Sequence[PoolText], tally: Tally, threads: int = 32, tasks: int = 32
    ) -> None:
        self._engines, self._texts, self._tally = engines, texts, tally
        self._threads, self._tasks = threads, tasks

    def send(self, requests: Sequence[SoakRequest]) -> int:
        """Send all of ``requests``; returns how many are lost: without result or error when none has come for `ANSWER_S`."""
        waiting, lock, before = iter(requests), threading.Lock(), self._tally.answered

        def take() -> Iterator[SoakRequest]:
            while True:
                with lock:
                    request = next(waiting, None)
                if request is None:
                    return
                yield request

        running = [threading.Thread(target=self._call, args=(take(),), daemon=True) for _ in range(self._threads)]
        running.append(threading.Thread(target=asyncio.run, args=(self._call_from_tasks(take),), daemon=True))
        for thread in running:
            thread.start()
        answered, since = before, monotonic()
        while any(thread.is_alive() for thread in running) and monotonic() - since < ANSWER_S:
            time.sleep(0.05)
            if self._tally.answered != answered:
                answered, since = self._tally.answered, monotonic()
        return len(requests) - (self._tally.answered - before)

    def _call(self, requests: Iterator[SoakRequest]) -> None:
        for request in requests:
            try:
                while (handle := self._submitted(request)) is None:
                    time.sleep(_REFUSED_S)
                chunks = self._streamed(handle, request) if request.streamed else None
                self._tally.note(request, handle.result(timeout=ANSWER_S), chunks)
            except Exception as error:  # whatever it is: a caller that dies would lose its later requests
                self._tally.note_error(request, error)

    async def _call_from_tasks(self, take: Any) -> None:
        await asyncio.gather(*(self._call_from_task(take()) for _ in range(self._tasks)))

    async def _call_from_task(self, requests: Iterator[SoakRequest]) -> None:
        for request in requests:
            try:
                while (handle := self._submitted(request)) is None:
                    await asyncio.sleep(_REFUSED_S)
                chunks = await self._streamed_async(handle, request) if request.streamed else None
                self._tally.note(request, await handle, chunks)
            except Exception as error:  # as above
                self._tally.note_error(request, error)

    def _submitted(self, request: SoakRequest) -> Any:
        """The request's handle; None when the queue is full."""
        text = self._texts[request.text]
        try:
            return self._engines[request.policy].submit(
                list(text.prompt),
                request.params(text),
                priority=request.priority,
                timeout=request.timeout,
                streamed=request.streamed,
            )
        except QueueFullError:
            self._tally.note_refused()
            return None

    @staticmethod
    def _streamed(handle: Any, request: SoakRequest) -> list[int]:
        if request.cancel_after == 0:
            handle.cancel()
        chunks = []
        for chunk in handle:
            chunks += [] if chunk.token_id is None else [chunk.token_id]
            if len(chunks) == request.cancel_after:
                handle.cancel()
        return chunks

    @staticmethod
    async def _streamed_async(handle: Any, request: SoakRequest) -> list[int]:
        if request.cancel_after == 0:
            handle.cancel()
        chunks = []
        async for chunk in handle:
            chunks += [] if chunk.token_id is None else [chunk.token_id]
            if len(chunks) == request.cancel_after:
                handle.cancel()
        return chunks
