"""The ways in which an engine may come to a text: alone, in company, from cached prefixes, in chunks, after preemption, with and
without drafts. All of them must give the text that policy `full` gives to a single caller.

No imports but the runtime's: this also runs under emulation, where every import takes long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tide_runtime import Engine, EngineOptions, Generation, GenerationParams, ThreadOptions


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
    """How the requests were run, and what came of it."""

    name: str
    texts: list[Text]
    figures: Counter[str] = field(default_factory=Counter)  # drafted, accepted, prefix_tokens, preemptions

    def differs(self, reference: Sequence[Text]) -> int:
        """How many texts are not the reference's."""
        return sum(own != other for own, other in zip(self.texts, reference, strict=True))


def run(engine: Engine, asks: Sequence[Ask], callers: int, name: str) -> Way:
    """All of ``asks`` from ``callers`` threads, each of which takes the next one when its own is answered."""
    with ThreadPoolExecutor(callers) as pool:
        done = list(pool.map(lambda ask: engine.submit(ask.prompt, ask.params, streamed=False).result(), asks))
    figures: Counter[str] = Counter()
    for one in done:
        figures += Counter(
            drafted=sum(one.stats.drafted.values()),
            accepted=sum(one.stats.accepted.values()),
            prefix_tokens=one.stats.prefix_tokens,
            preemptions=one.stats.preemptions,
        )
    return Way(name, [Text.of(one) for one in done], figures)


def ways(bundle: Path, asks: Sequence[Ask], crowds: Sequence[int], scarce: int, threads: ThreadOptions) -> Iterator[Way]:
    """The reference first: policy `full`, one caller, nothing cached. Then every other way.

    Args:
        crowds: numbers of callers at once.
        scarce: bytes of KV memory with which the largest crowd preempts.
    """
    options = EngineOptions(policy="full", max_batch=max(crowds), threads=threads, verify=False, target="cpu")
    fresh = [Ask(ask.prompt, replace(ask.params, use_prefix_cache=False)) for ask in asks]
    with Engine.load(bundle, options) as engine:
        yield run(engine, fresh, 1, "full, alone")
        yield run(engine, asks, 1, "full, prompts cached")
        yield run(engine, asks, 1, "full, asked again")
        for crowd in crowds:
            yield run(engine, fresh, crowd, f"full, {crowd} callers")
    with Engine.load(bundle, replace(options, policy="auto")) as engine:
        yield run(engine, fresh, 1, f"auto ({engine.policy.name}), alone")
        for crowd in crowds:
            yield run(engine, asks, crowd, f"auto ({engine.policy.name}), {crowd} callers")
    small = replace(options, policy="auto", prefill_chunk=5, kv_memory=scarce)
    with Engine.load(bundle, small) as engine:
        yield run(engine, asks, max(crowds), f"auto ({engine.policy.name}), {max(crowds)} callers, preempted, prompts in chunks of 5")
