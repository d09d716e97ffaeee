"""Reading a request's body: a JSON object, checked against the endpoint's table of fields and the types of the openai package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.nesting import is_deeper
from tide_serve.request_fields import Support, check_fields
from tide_serve.request_types import RequestTypes

_NESTING = 16  # levels of a body above and beside a JSON schema


async def read_body(request: Request, fields: Mapping[str, Support], types: RequestTypes, config: ServeConfig) -> dict[str, Any]:
    """The body without its null fields, which ask for the default.

    Raises ApiError for a body that is not a JSON object, for fields that are missing, unknown or cannot be honoured, and for
    values of another type.
    """
    body = _object(await _raw(request))
    for name, value in body.items():
        if is_deeper(value, config.max_schema_depth + _NESTING):
            raise ApiError(400, f"{name!r:.80} is nested more deeply than any request needs; send a flatter value", name[:80])
    check_fields(body, fields)
    types.check(body)
    return body


async def _raw(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser asks before it sends JSON to another origin, and does not for other types.
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind!r}, expected a JSON body with Content-Type: application/json")
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before the body was complete; send the request again") from error


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(400, "the body has half of a surrogate pair, expected valid Unicode; send whole characters") from error
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start}), expected JSON in UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply; send a flatter JSON object") from error
    except ValueError as error:
        raise ApiError(400, f'the body is not JSON ({error}); send a JSON object such as {{"model": …}}') from error
    if not isinstance(body, dict):
        raise ApiError(400, f'the body is a JSON {type(body).__name__}, expected an object such as {{"model": …}}')
    return {name: value for name, value in body.items() if value is not None}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
