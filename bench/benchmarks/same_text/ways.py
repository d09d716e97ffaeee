"""Ways in which an engine comes to a text: alone, in company, from cached prefixes, in chunks, after preemption, with and without
drafts. All of them have to give the text that policy `full` gives to a single caller.

No imports but the runtime's: this also runs under emulation, where every import takes long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import NamedTuple

from tide_runtime import Engine, Generation, GenerationParams
from tide_runtime.bundle.manifest import Manifest


class Ask(NamedTuple):
    """A prompt of token ids, and how to go on from it."""

    prompt: list[int]
    params: GenerationParams


class Text(NamedTuple):
    """What one request gave. ``logprobs``: of each token, where the request asked for them; equal ones mean equal logits."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, generation: Generation) -> Text:
        return cls(generation.token_ids, tuple(one.logprob for one in generation.logprobs))


@dataclass(frozen=True)
class Way:
    """How requests are run.

    Args:
        callers: requests at once.
        cached: prompts may come from the prefix cache, which earlier ways of the same engine fill.
        scarce: so little KV memory that requests are preempted, and prompts in chunks of 13 tokens.
    """

    policy: str
    callers: int
    cached: bool = False
    scarce: bool = False

    @property
    def name(self) -> str:
        who = "alone" if self.callers == 1 else f"{self.callers} callers"
        return f"{self.policy}, {who}{', cached' * self.cached}{', preempted' * self.scarce}"


REFERENCE = Way("full", 1)
_SCARCE_ROWS = 3  # whose states the scarce memory holds
_MIN_TOKEN_BYTES = 256  # bytes that count for a token where no layer has keys and values


@dataclass(frozen=True)
class Outcome:
    """What came of a way. ``figures``: drafted, accepted, prefix_tokens, preemptions; ``ran``: the policy that `auto` was."""

    way: Way
    ran: str
    texts: list[Text]
    figures: Counter[str]

    def differs(self, reference: Sequence[Text]) -> int:
        """How many texts are not the reference's."""
        return sum(own != other for own, other in zip(self.texts, reference, strict=True))


def outcomes(weights: Engine, asks: Sequence[Ask], ways: Sequence[Way]) -> Iterator[Outcome]:
    """What comes of ``ways``, in their order, on loaded weights. Neighbours of the same policy share an engine."""
    for (policy, scarce), group in groupby(ways, lambda way: (way.policy, way.scarce)):
        own = list(group)
        options = replace(weights.options, policy=policy, max_batch=max(way.callers for way in own), prefix_cache=True)
        if scarce:
            options = replace(options, prefill_chunk=13, kv_memory=_scarce_memory(weights.manifest, asks))
        with weights.with_options(options) as engine:
            for way in own:
                yield _run(engine, way, asks)


def _scarce_memory(manifest: Manifest, asks: Sequence[Ask]) -> int:
    """Bytes of fp32 keys and values that hold the longest sequence of the bundle and half of the longest text, and of the states
    of some sequences, each of which is there twice."""
    tokens = manifest.max_seq_len + max(len(ask.prompt) + ask.params.max_new_tokens for ask in asks) // 2
    token_bytes = sum(4 * kv.heads * (kv.key_dim + kv.value_dim) for kv in manifest.kv.values()) or _MIN_TOKEN_BYTES
    return tokens * token_bytes + _SCARCE_ROWS * 2 * sum(4 * prod(state.shape) for state in manifest.states.values())


def _run(engine: Engine, way: Way, asks: Sequence[Ask]) -> Outcome:
    """All of ``asks`` from threads, each of which takes the next one when its own is answered."""
    params = [replace(ask.params, use_prefix_cache=way.cached or way.scarce) for ask in asks]
    with ThreadPoolExecutor(way.callers) as pool:
        done = list(pool.map(lambda ask, own: engine.submit(ask.prompt, own, streamed=False).result(), asks, params))
    figures: Counter[str] = Counter()
    for one in done:
        figures += Counter(
            drafted=sum(one.stats.drafted.values()),
            accepted=sum(one.stats.accepted.values()),
            prefix_tokens=one.stats.prefix_tokens,
            preemptions=one.stats.preemptions,
        )
    return Outcome(way, engine.policy.name, [Text.of(one) for one in done], figures)
