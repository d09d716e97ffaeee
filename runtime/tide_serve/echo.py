"""``echo`` of /v1/completions: the prompt before each choice, with log-probabilities of its tokens where they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from tide_runtime import Score
from tide_runtime.sampler import TokenLogprob
from tide_runtime.scoring import ScoreHandle

from tide_serve.prompts import Prompt
from tide_serve.running import ClientWatch, out_of_time
from tide_serve.service import Service


@dataclass(frozen=True)
class Echo:
    """The prompts of a request, each of which has ``n`` choices.

    Args:
        scored: of each prompt, log-probabilities of the tokens after the first.
    """

    prompts: Sequence[Prompt]
    n: int
    scored: Sequence[Sequence[TokenLogprob]]

    def prompt(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]

    def logprobs(self, choice: int) -> tuple[int, Sequence[TokenLogprob]]:
        """How many of the prompt's tokens have no probability, which is the first one, and the others' log-probabilities."""
        return min(1, len(self.prompt(choice).ids)), self.scored[choice // self.n]


async def echo_of(service: Service, request: Request, prompts: Sequence[Prompt], n: int, top: int | None) -> Echo:
    """The echo of ``prompts`` with the ``top`` likeliest tokens at each place; None: without log-probabilities.

    Raises what `Engine.submit_score` raises, EngineClosedError where the client leaves, and ApiError beyond the time limit.
    """
    if top is None:
        return Echo(prompts, n, [()] * len(prompts))
    return Echo(prompts, n, await _scored(service, request, [prompt.ids for prompt in prompts], top))


async def _scored(service: Service, request: Request, prompts: Sequence[Sequence[int]], top: int) -> list[list[TokenLogprob]]:
    engine, handles = service.engine, list[ScoreHandle | None]()

    def cancel() -> None:
        for handle in handles:
            if handle is not None:
                handle.cancel()

    client = ClientWatch(request, cancel)
    try:
        for ids in prompts:
            handles.append(engine.submit_score(ids, 1, top=max(1, top)) if len(ids) > 1 else None)
        async with asyncio.timeout(service.config.request_timeout):
            scores = [await handle if handle is not None else None for handle in handles]
    except TimeoutError as error:
        raise out_of_time(service.config) from error
    finally:
        client.close()
        cancel()
    return [_entries(ids, score) if score is not None else [] for ids, score in zip(prompts, scores, strict=True)]


def _entries(ids: Sequence[int], score: Score) -> list[TokenLogprob]:
    """A token among the likeliest has the same number in both lists, so that clients can tell whether it is the likeliest."""
    entries = []
    for token, logprob, top in zip(ids[1:], score.logprobs, score.top, strict=True):
        entries.append(TokenLogprob(token, dict(top).get(token, logprob), top))
    return entries
