"""Errors in the form of the API that a request belongs to.

OpenAI's is ``{"error": {"message", "type", "param", "code"}}``; below ``/v1/messages`` it is Anthropic's,
``{"type": "error", "error": {"type", "message"}, "request_id"}``, whose message names the field. A request with the header
``anthropic-version`` belongs to that API on all routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope
from tide_runtime.errors import EngineClosedError, ParamsError, PromptError, QueueFullError, TideError

from tide_serve.observe.request_record import current_record

RETRY_S = 5.0  # seconds after which a client should retry where the next request, or another server, may succeed
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_ROUTE = "/v1/messages"
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}


class ApiError(Exception):
    """A refused request.

    Args:
        param: the field of the request that is wrong; None: none in particular.
        code: a word for programs, such as ``unsupported_parameter``.
        retry_after: seconds, sent as the header ``Retry-After``.
        logged: what the log says, where ``message`` quotes the request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.logged = logged or message

    def renamed(self, name_of: Callable[[str], str]) -> ApiError:
        """The same error about the field that another API calls ``name_of(param)``."""
        if self.param is None:
            return self
        name = name_of(self.param)
        message, logged = (text.replace(self.param, name, 1) for text in (self.message, self.logged))
        return ApiError(self.status, message, name, self.code, self.retry_after, logged)

    def body(self, scope: Scope) -> dict[str, Any]:
        """The error object of the API that the request of ``scope`` belongs to."""
        anthropic = is_anthropic(scope)
        other = "invalid_request_error" if self.status < 500 else "api_error" if anthropic else "server_error"
        if not anthropic:
            kind = _TYPES.get(self.status, other)
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        record = current_record.get()
        error = {"type": _ANTHROPIC_TYPES.get(self.status, other), "message": message}
        return {"type": "error", "error": error, "request_id": record.id if record is not None else None}

    def response(self, scope: Scope) -> JSONResponse:
        """The answer, which the request's line in the log gives the reason of."""
        if (record := current_record.get()) is not None:
            record.param, record.reason = self.param, self.logged
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}
        return JSONResponse(self.body(scope), self.status, headers)


@contextmanager
def fields_named(name_of: Callable[[str], str]) -> Iterator[None]:
    """An ApiError from inside is about the field that the request calls ``name_of(param)``."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(name_of) from error


def stopping() -> ApiError:
    """The error of requests that a server which ends has not answered."""
    return ApiError(503, "the server is stopping; send the request to another one", None, "cancelled", RETRY_S)


def path_of(scope: Scope) -> str:
    """The path of a request as the routes declare it, without the mount point of the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_anthropic(scope: Scope) -> bool:
    """Whether the request is one of Anthropic's API."""
    path = path_of(scope)
    return path == _ANTHROPIC_ROUTE or path.startswith(f"{_ANTHROPIC_ROUTE}/") or "anthropic-version" in Headers(scope=scope)


def api_error(error: Exception) -> ApiError:
    """What a client is told about ``error``. Only messages of `TideError` are shown; others may hold a request's text."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=1)
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed", retry_after=5)
    if isinstance(error, ParamsError):
        return ApiError(400, str(error), error.field)
    if isinstance(error, PromptError):
        return ApiError(400, str(error))
    if isinstance(error, TideError):
        return ApiError(500, str(error))
    if isinstance(error, HTTPException):  # unknown routes and methods
        return ApiError(error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return ApiError(400, str(first["msg"]), ".".join(str(part) for part in first["loc"][1:]) or None)
    return ApiError(500, "the server failed; its log names the request id", code="internal_error")


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of the application."""
    return api_error(error).response(request.scope)
