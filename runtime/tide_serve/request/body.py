"""Reads a request's body: a JSON object of known fields, whose values have the types of the openai and anthropic packages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import typing_extensions
from fastapi import Request
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict, is_typeddict

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError

_LEVELS = 16  # of nesting that a body needs above its JSON schemas
_STRICT = ConfigDict(extra="forbid", strict=True)
_TAGS = ("role", "type")  # keys whose value says which type of a union is meant
_MISSING = ("missing", "union_tag_not_found")


@dataclass(frozen=True)
class Support:
    """What becomes of a field.

    Args:
        kind: ``harmless`` fields are accepted and ignored: they have no effect on an answer.
        accepts: values of a refused field that are accepted, because the server acts that way in any case.
        reason: why other values are refused, and what to do.
    """

    kind: Literal["supported", "harmless", "refused"]
    accepts: tuple[Any, ...] = ()
    reason: str = ""


class RequestTypes:
    """The types of an endpoint's fields.

    Args:
        params: TypedDict of the openai or the anthropic package.
        extensions: types of fields that ``params`` does not have, or for which it has another type.
        required: names of fields; None: those of ``params``.

    ``adapters``: pydantic's check of each field.
    """

    def __init__(self, params: type, extensions: Mapping[str, Any], required: Sequence[str] | None = None) -> None:
        hints = typing_extensions.get_type_hints(params, include_extras=True)
        self.required = [name for name, hint in hints.items() if get_origin(hint) is Required] if required is None else required
        hints |= extensions
        self.adapters = {name: TypeAdapter(strict_type(_plain(hint))) for name, hint in hints.items()}

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise ApiError for the first field of ``body`` that is missing or of another type, with its path as ``param``."""
        for name in self.required:
            if name not in body:
                raise ApiError(400, f"{name} is missing; give a value for it", name, "missing_required_parameter")
        for name, value in body.items():
            try:
                self.adapters[name].validate_python(value, strict=True)
            except ValidationError as error:
                raise _type_error(name, value, error) from error


@dataclass(frozen=True)
class BodyForm:
    """The body of an endpoint's requests.

    Args:
        name: its schema's name in ``/openapi.json``.
        make_types: called when the first request comes, as it takes a while.
    """

    name: str
    fields: Mapping[str, Support]
    make_types: Callable[[], RequestTypes]

    @cached_property
    def types(self) -> RequestTypes:
        return self.make_types()

    async def ready_types(self) -> RequestTypes:
        """`types`, made in a thread where they are not there yet, as streams would stop meanwhile."""
        return self.types if "types" in self.__dict__ else await asyncio.to_thread(lambda: self.types)


async def read_body(request: Request, form: BodyForm, config: ServeConfig) -> dict[str, Any]:
    """The body without its null fields, which mean the default.

    Raises ApiError for a body that is not a JSON object, for fields that are missing, unknown or cannot be honoured, and for
    values of another type.
    """
    body = _object(await _raw(request))
    for name, value in body.items():
        if is_deeper(value, config.max_schema_depth + _LEVELS):
            raise ApiError(400, f"{name!r:.80} is nested more deeply than any request needs; send a flatter value", name[:80])
    check_fields(body, form.fields)
    (await form.ready_types()).check(body)
    return body


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Support]) -> None:
    """Raise ApiError for the first field of ``body`` that ``fields`` lacks or refuses."""
    for name, value in body.items():
        support = fields.get(name)
        if support is None:
            raise ApiError(400, f"the field {name!r:.80} is not known here; leave it out", name[:80], "unknown_parameter")
        # True equals 1 to Python, and is another value to a client.
        accepted = any(type(value) is type(same) and value == same for same in support.accepts)
        if support.kind == "refused" and not accepted:
            raise ApiError(400, f"{name} is not supported: {support.reason}", name, "unsupported_parameter")


def is_deeper(value: Any, limit: int) -> bool:
    """Whether ``value`` has more than ``limit`` levels of objects and lists. No recursion: a client may send any number."""
    level = _containers([value])
    for _ in range(limit):
        level = [child for parent in level for child in _containers(parent.values() if isinstance(parent, dict) else parent)]
    return bool(level)


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]


async def _raw(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser sends a preflight request before it sends JSON to another origin, and sends other types without one.
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


@cache
def strict_type(hint: Any) -> Any:
    """``hint`` for a check of JSON values: unknown keys are errors, numbers are not made of strings, iterables are lists.

    pydantic checks an Iterable only when it is read, and accepts unknown keys of a TypedDict silently.
    """
    if is_typeddict(hint):
        return _strict_typed_dict(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Required, NotRequired):
        return origin[strict_type(parts[0])]
    if origin in (Iterable, Sequence, list):
        return list[strict_type(parts[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[strict_type(parts[0]), strict_type(parts[1])]  # type: ignore[misc]
    if origin in (Union, UnionType):
        return _strict_union(parts)
    return hint


def _strict_typed_dict(hint: Any) -> Any:
    hints = typing_extensions.get_type_hints(hint, include_extras=True)
    strict = TypedDict(hint.__name__, {name: strict_type(part) for name, part in hints.items()}, total=False)  # type: ignore[misc]
    strict.__pydantic_config__ = _STRICT  # type: ignore[attr-defined]
    return strict


def _strict_union(parts: Sequence[Any]) -> Any:
    """The union with its TypedDicts told apart by role or type, so that an error is about the one that was meant."""
    objects = [part for part in parts if is_typeddict(part)]
    others = [strict_type(part) for part in parts if not is_typeddict(part)]
    if len(objects) > 1:
        tag = next(tag for tag in _TAGS if all(tag in part.__annotations__ for part in objects))
        together: Any = Union[tuple(map(strict_type, objects))]  # noqa: UP007
        others.append(Annotated[together, Field(discriminator=tag)])
    else:
        others += map(strict_type, objects)
    if str in others:  # a union of str and literals is documentation
        others = [part for part in others if get_origin(part) is not Literal]
    return Union[tuple(others)]  # noqa: UP007


def _plain(hint: Any) -> Any:
    """A field's type without Required, which is a fact about the whole body."""
    return get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint


def _type_error(name: str, value: Any, error: ValidationError) -> ApiError:
    """The error about the deepest path: pydantic reports one for each alternative of a union; a wrong type explains others."""
    found: dict[str, tuple[Any, list[Mapping[str, Any]]]] = {}
    for detail in error.errors(include_url=False):
        path, at = _path(name, value, detail)
        found.setdefault(path, (at, []))[1].append(detail)
    deepest = max(found, key=lambda path: (path.count(".") + path.count("["), path.endswith(_TAGS)))
    return ApiError(400, f"{deepest} {_wording(*found[deepest])}", deepest, "invalid_type")


def _path(name: str, value: Any, detail: Mapping[str, Any]) -> tuple[str, Any]:
    """The path, as in ``messages[0].content``, and the value there; pydantic puts the names of union members in between."""
    path, at, steps = name, value, [*detail["loc"]]
    if "discriminator" in detail.get("ctx", {}):
        steps.append(detail["ctx"]["discriminator"].strip("'"))
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if isinstance(at, list) and isinstance(step, int) and step < len(at):
            path, at = f"{path}[{step}]", at[step]
        elif isinstance(at, dict) and (step in at or (last and detail["type"] in _MISSING)):
            path, at = f"{path}.{step}", at.get(step)
    return path, at


def _wording(value: Any, details: Sequence[Mapping[str, Any]]) -> str:
    if details[0]["type"] in _MISSING:
        return "is missing; give a value for it"
    if details[0]["type"] == "extra_forbidden":
        return "is not known here; leave it out"
    expected = [d.get("ctx", {}).get("expected_tags") or d["msg"].removeprefix("Input should be ") for d in details]
    return f"is {_short(value)}, expected {' or '.join(dict.fromkeys(expected))}"


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{value!r:.60}"
