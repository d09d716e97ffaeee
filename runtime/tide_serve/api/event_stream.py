"""Server-sent events: one JSON document per event, as OpenAI's API streams them, and the events of choices."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from tide_runtime import Chunk, Generation, GenerationParams, TideError
from tide_runtime.sampler import TokenLogprob

from tide_serve.api.answer_fields import usage_of
from tide_serve.api.generations import Generations, Indexed
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError, api_error
from tide_serve.request.parameters import StreamOptions

DONE = "data: [DONE]\n\n"
_log = logging.getLogger("tide_serve")

quoted = json.JSONEncoder(ensure_ascii=False).encode


def event(document: Mapping[str, Any]) -> str:
    """``document`` as one event."""
    return f"data: {quoted(document)}\n\n"


class EventStream(Response):
    """An answer of events.

    Args:
        first: the first events: a request that fails before them is answered with its status (see `respond`).
        rest: closed when the answer has ended, for whatever reason. Its error becomes a last event.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str]) -> None:
        # Proxies such as nginx would otherwise collect events before they pass them on.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            while (events := await self._next()) is not None:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> str | None:
        """The next events; None after the last. An error is one event, and the last."""
        try:
            return await anext(self._rest, None)
        except Exception as error:
            return event(stream_error(error).body())


def stream_error(error: Exception) -> ApiError:
    """What a client is told of ``error``, which ended its stream; an unforeseen one is logged."""
    if not isinstance(error, TideError | ApiError):
        _log.exception("a stream failed")
    return api_error(error)


async def respond(
    model: ServedModel,
    request: Request,
    jobs: Sequence[tuple[Sequence[int], GenerationParams]],
    stream: Callable[[Generations], AsyncGenerator[str]] | None,
    document: Callable[[list[Generation]], dict[str, Any]],
) -> Response:
    """The answer of the generations of ``jobs``: the events of ``stream``; None: the ``document`` of their results.

    Raises what generating them raises, with a stream until its first events are there.
    """
    generations = Generations(model, request, jobs, streamed=stream is not None)
    if stream is None:
        results = await generations.results()
        return Response(status_code=499) if generations.client_left else JSONResponse(document(results))
    events = stream(generations)
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


class ChoiceStream(ABC):
    """Writes the chunks of a request's choices as the events of chats and completions.

    This runs once for each token of every client, so an event is put together from strings and not from objects.

    Args:
        head: the first fields of every event (see `answer_head`).
        top_logprobs: None: no log-probabilities.
    """

    def __init__(self, model: ServedModel, head: dict[str, Any], options: StreamOptions, top_logprobs: int | None) -> None:
        self._model, self._head, self._options, self._top = model, head, options, top_logprobs
        self._before = f'data: {quoted(head)[:-1]}, "choices": [{{"index": '
        self._after = '}], "usage": null}\n\n' if options.include_usage else "}]}\n\n"

    @abstractmethod
    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        """The events of ``chunks``, which follow each other in one choice."""

    @abstractmethod
    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The field ``logprobs`` of an event."""

    def _of_batch(self, arrived: Sequence[Indexed]) -> str:
        """The events of chunks that are there together."""
        if len(arrived) == 1 or self._options.include_depth:  # with depths, each token has an event of its own
            return "".join([self._of_choice(choice, [chunk]) for choice, chunk in arrived])
        chunks: dict[int, list[Chunk]] = {}
        for choice, chunk in arrived:
            chunks.setdefault(choice, []).append(chunk)
        return "".join(self._of_choice(choice, of_choice) for choice, of_choice in chunks.items())

    def _needs_event(self, text: str) -> bool:
        return bool(text) or self._top is not None or self._options.include_depth

    def _text_event(self, choice: int, content: str, chunks: Sequence[Chunk]) -> str:
        """The event of ``chunks`` with log-probabilities and depths, where they are requested."""
        logprobs, depths = "null", ""
        if self._top is not None:
            entries = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            logprobs = quoted(self._logprobs(choice, entries))
        if self._options.include_depth:
            depths = f', "depths": {[chunk.depth for chunk in chunks if chunk.depth is not None]}'
        return self._event(choice, content, logprobs, depths=depths)

    def _event(self, choice: int, content: str, logprobs: str = "null", reason: str = "null", depths: str = "") -> str:
        """An event. ``content``: the field with the text, name included; all arguments but ``choice`` are JSON."""
        fields = f'{choice}, {content}, "logprobs": {logprobs}, "finish_reason": {reason}{depths}'
        return f"{self._before}{fields}{self._after}"

    def _ending(self, generations: Sequence[Generation], n: int, prompt_tokens: int | None = None) -> str:
        """The last events. ``n``, ``prompt_tokens``: see `usage_of`."""
        if not self._options.include_usage:
            return DONE
        usage = usage_of(self._model.engine, generations, n, prompt_tokens)
        return event({**self._head, "choices": [], "usage": usage}) + DONE
