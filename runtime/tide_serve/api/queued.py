"""Results of one request's texts, which wait for the engine some at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from fastapi import Request
from tide_runtime.scheduling.handle import ResultHandle

from tide_serve.api.service import ClientWatch, ServedModel, out_of_time

_AHEAD = 4  # texts of a request that are queued, by sequences that run at once
Result = TypeVar("Result")


async def results_of(model: ServedModel, request: Request, jobs: Iterable[Callable[[], ResultHandle[Result]]]) -> list[Result]:
    """The results of ``jobs``, which queue a text each: a request may have more than the engine's queue holds.

    Raises what the jobs raise, EngineClosedError where the client leaves, and ApiError beyond the time limit.
    """
    engine = model.engine
    handles = deque[ResultHandle[Result]]()
    results = list[Result]()

    def cancel() -> None:
        for handle in handles:
            handle.cancel()

    client = ClientWatch(request, cancel)
    try:
        async with asyncio.timeout(model.seconds_left):
            for job in jobs:
                if len(handles) >= min(_AHEAD * engine.max_batch, engine.options.max_queue):
                    results.append(await handles.popleft())
                handles.append(job())
            while handles:
                results.append(await handles.popleft())
    except TimeoutError as error:
        raise out_of_time(model.config) from error
    finally:
        client.close()
        cancel()
    return results
