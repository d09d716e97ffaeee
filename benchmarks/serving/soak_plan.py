"""What a soak sends: a pool of texts whose tokens are known, and requests for them that callers abort, delay and prefer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tide_runtime import GenerationParams

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
