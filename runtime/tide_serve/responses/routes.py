"""POST /v1/responses: OpenAI's Responses API for text.

Fields are those of OpenAI's API; `request_fields.RESPONSE_FIELDS` says what becomes of each. Extensions are those of
/v1/chat/completions, with ``text.format`` in place of ``response_format``, and without ``include_depth``. ``usage`` has ``depth``
(see `tide_serve.usage`).

Nothing is stored: an id cannot be given to later requests, and ``store`` is false in every response. Tools are functions, and are
strict where ``strict`` is true. A response that the server's time limit ends is incomplete for the reason "max_output_tokens".
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from tide_runtime import Generation

from tide_serve.event_stream import begun
from tide_serve.logprobs import chat_logprobs
from tide_serve.request_body import read_body
from tide_serve.responses.request import ResponseRequest, checked
from tide_serve.responses.request_fields import RESPONSE_FIELDS, response_types
from tide_serve.responses.response_events import ResponseEvents
from tide_serve.responses.response_object import OutputItem, call_item, finished, is_cut_off, item_id, message_item
from tide_serve.running import Running
from tide_serve.service import Service


def responses_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await read_body(request, RESPONSE_FIELDS, response_types(), service.config)
        asked = await checked(service, body)
        running = Running(service, request, asked.chat.jobs, streamed=asked.chat.stream is not None)
        if asked.chat.stream is not None:
            return await begun(ResponseEvents(service, asked).events(running))
        [generation] = await running.results()
        if running.client_left:
            return Response(status_code=499)
        return JSONResponse(_response(service, asked, generation))

    return router


def _response(service: Service, asked: ResponseRequest, generation: Generation) -> dict[str, Any]:
    text, calls = asked.chat.tools.split(generation.text or "")
    logprobs = []
    if asked.chat.top_logprobs is not None:
        logprobs = chat_logprobs(generation.logprobs, asked.chat.top_logprobs, service.token_texts)["content"]
    output: list[OutputItem] = []
    if text or not calls:
        output.append(message_item(item_id("msg"), text, logprobs, "incomplete" if is_cut_off(generation) else "completed"))
    output += [call_item(call) for call in calls]
    return finished(service.engine, asked, output, generation)
