"""Server-sent events: one JSON document per event, as OpenAI's API streams them, and the events of choices and of items."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from tide_runtime import Chunk, Generation, GenerationParams, TideError
from tide_runtime.sampler import TokenLogprob

from tide_serve.api.answer_fields import usage_of
from tide_serve.api.generations import Generations, Indexed
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError, api_error, is_anthropic
from tide_serve.request.answer_parser import AnswerParser
from tide_serve.request.parameters import StreamOptions

DONE = "data: [DONE]\n\n"
_log = logging.getLogger("tide_serve")

quoted = json.JSONEncoder(ensure_ascii=False).encode


def event(document: Mapping[str, Any]) -> str:
    """``document`` as one event."""
    return f"data: {quoted(document)}\n\n"


def named_event(kind: str, **fields: Any) -> str:
    """``fields`` as one event, whose name is its type."""
    return f"event: {kind}\n" + event({"type": kind, **fields})


def error_event(error: ApiError, scope: Scope) -> str:
    """``error`` as the last event of a stream, in the form of the request's API: Anthropic's events have names."""
    return ("event: error\n" if is_anthropic(scope) else "") + event(error.body(scope))


class AnswerStream(ABC):
    """Writes the chunks of a request's generations as events, once for each token of every client. Events of text are therefore
    put together from strings and not from objects."""

    @abstractmethod
    def events(self, generations: Generations) -> AsyncGenerator[str]:
        """All events, those that are there together in one string."""

    def failed(self, error: ApiError, scope: Scope) -> str:
        """The last events of a stream that ``error`` has ended."""
        return error_event(error, scope)


class EventStream(Response):
    """An answer of events.

    Args:
        first: the first events: a request that fails before them is answered with its status (see `respond`).
        rest: closed when the answer has ended, for whatever reason. Its error becomes a last event, which ``stream`` writes.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str], stream: AnswerStream) -> None:
        # Proxies such as nginx would otherwise collect events before they pass them on.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            while (events := await self._next(scope)) is not None:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, scope: Scope) -> str | None:
        """The next events; None after the last. An error is one event, and the last."""
        try:
            return await anext(self._rest, None)
        except Exception as error:
            if not isinstance(error, TideError | ApiError):
                _log.exception("a stream failed")
            return self._stream.failed(api_error(error), scope)


async def respond(
    model: ServedModel,
    request: Request,
    jobs: Sequence[tuple[Sequence[int], GenerationParams]],
    stream: AnswerStream | None,
    document: Callable[[list[Generation]], dict[str, Any]],
) -> Response:
    """The answer of the generations of ``jobs``: the events of ``stream``; None: the ``document`` of their results.

    Raises what generating them raises, with a stream until its first events are there.
    """
    generations = Generations(model, request, jobs, streamed=stream is not None)
    if stream is None:
        results = await generations.results()
        return Response(status_code=499) if generations.client_left else JSONResponse(document(results))
    events = stream.events(generations)
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, stream)


class ItemStream(AnswerStream):
    """The events of one generation whose answer begins, has items that follow each other, and ends."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    async def events(self, generations: Generations) -> AsyncGenerator[str]:
        begin = self._begin()
        async with aclosing(generations.chunks()) as chunks:
            async for arrived in chunks:
                events = begin + self._add([chunk for _, chunk in arrived])
                begin = ""
                if (last := arrived[-1][1].generation) is not None:
                    events += self._end(last)
                if events:
                    yield events

    @abstractmethod
    def _begin(self) -> str:
        """The first events."""

    @abstractmethod
    def _add(self, chunks: Sequence[Chunk]) -> str:
        """The events of ``chunks``, which follow each other."""

    @abstractmethod
    def _end(self, generation: Generation) -> str:
        """The last events."""


class ChoiceStream(AnswerStream):
    """The events of the choices of chats and completions.

    Args:
        head: the first fields of every event (see `answer_head`).
        top_logprobs: None: no log-probabilities.
        n: choices of each prompt.
    """

    def __init__(
        self, model: ServedModel, head: dict[str, Any], options: StreamOptions, top_logprobs: int | None, n: int
    ) -> None:
        self._model = model
        self._head = head
        self._options = options
        self._top = top_logprobs
        self._n = n
        self._before = f'data: {quoted(head)[:-1]}, "choices": [{{"index": '
        self._after = '}], "usage": null}\n\n' if options.include_usage else "}]}\n\n"

    async def events(self, generations: Generations) -> AsyncGenerator[str]:
        finished: dict[int, Generation] = {}
        with closing(generations):  # they run while the first events are sent
            if begin := self._begin():
                yield begin
            async with aclosing(generations.chunks()) as chunks:
                async for arrived in chunks:
                    finished |= {choice: chunk.generation for choice, chunk in arrived if chunk.generation is not None}
                    if events := self._of_batch(arrived):
                        yield events
        yield self._ending([finished[choice] for choice in sorted(finished)])

    def _begin(self) -> str:
        """The first events, before anything is generated."""
        return ""

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

    def _ending(self, generations: Sequence[Generation], prompt_tokens: int | None = None) -> str:
        """The last events. ``prompt_tokens``: see `usage_of`."""
        if not self._options.include_usage:
            return DONE
        usage = usage_of(self._model.engine, generations, self._n, prompt_tokens)
        return event({**self._head, "choices": [], "usage": usage}) + DONE
