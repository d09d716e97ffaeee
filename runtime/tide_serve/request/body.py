"""Reads a request's body: a JSON object whose fields, and the objects inside, are pydantic models.

A field that changes the text is one of its model, or refused by its name. Any other has no effect here: it is left out, and the
request's line in the log names it. ``ServeConfig.strict_fields`` refuses those that no known client sends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fastapi import Request
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema
from starlette.requests import ClientDisconnect

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.observe.request_record import note_no_effect

_LEVELS = 16  # nesting levels that a body may have around its JSON schemas
_INDEX = re.compile(r"\[\d+\]")
_LISTS: dict[Any, str] = {list[str]: "strings", list[int]: "integers", list[list[int]]: "lists of integers"}
_KINDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
_OBJECT = f"<{_KINDS[dict]}>"


class Part(BaseModel):
    """An object of a request. A null is an absent key, at any depth."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


@dataclass(frozen=True)
class OneOf:
    """Annotation of a union: a value's alternative follows from its kind of JSON value, and of an object from its key ``key``.

    pydantic's own unions try all alternatives and have their names in the paths of errors. Here a path has only keys and
    indices, besides tags in angle brackets, which `_path` leaves out.

    Args:
        key: its value is a literal in each alternative; one where it is any string takes all other values, and one without it
            all objects.
        default: the value of an absent key.
    """

    key: str = "type"
    default: str | None = None

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag: handler.generate_schema(part) for part in get_args(union) for tag in self._tags(part)}

        def tag_of(value: Any) -> str:
            if isinstance(value, dict) and _OBJECT not in choices:
                tag = f"<{self.key}={value.get(self.key) or self.default}>"
                return f"<{self.key}>" if tag not in choices and value.get(self.key) and f"<{self.key}>" in choices else tag
            kind = _KINDS.get(type(value), "null")
            return f"<{kind}>" if not isinstance(value, list) or f"<{kind}>" in choices else f"<{kind} of {_items(value)}>"

        return core_schema.tagged_union_schema(choices, tag_of)

    def __get_pydantic_json_schema__(self, union: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(union)
        return {"anyOf": described.pop("oneOf"), **described}  # one that takes all other values would be a second one

    def _tags(self, part: Any) -> list[str]:
        if isinstance(part, type) and issubclass(part, Part):
            if self.key not in part.model_fields:
                return [_OBJECT]
            # Flat, as the annotation of a key that may be absent is a union of its literal and None.
            literals = [each for arg in get_args(part.model_fields[self.key].annotation) for each in get_args(arg) or (arg,)]
            return [f"<{self.key}={each}>" for each in literals if isinstance(each, str)] or [f"<{self.key}>"]
        if part in _LISTS:
            return [f"<a list of {_LISTS[part]}>"]
        kind = str if get_origin(part) is Literal else get_origin(part) or part
        return [f"<{_KINDS[kind]}>"]


def _items(value: list[Any]) -> str:
    """What a list has, by its first item; an empty one, strings."""
    first: Any = type(value[0]) if value else str
    return _LISTS.get(list[list[int]] if first is list else list[first], "others")


@dataclass(frozen=True)
class Refused:
    """A field that changes the text, and cannot be honoured.

    Args:
        reason: and what to do.
        accepts: values with which it changes nothing.
    """

    reason: str
    accepts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class BodyTypes:
    """The model of a body.

    Args:
        harmless: names of fields, at any depth, that are known to have no effect.
    """

    model: type[Part]
    harmless: frozenset[str]

    def check(self, body: Mapping[str, Any], strict: bool = False) -> dict[str, Any]:
        """``body`` without nulls and without what has no effect, which the log gets.

        Raises ApiError for the first field that is missing or of another type, with its path as ``param``, and with ``strict``
        for one that is not known.
        """
        try:
            parsed = self.model.model_validate(body)
        except ValidationError as error:
            raise _type_error(error) from error
        idle: list[str] = []
        clean: dict[str, Any] = _cleaned(body, parsed, "", idle)
        if strict and (name := next((path[:80] for path in idle if path.rpartition(".")[2] not in self.harmless), None)):
            message = f"{name} is not known here; leave it out, or start the server without --strict-fields"
            raise ApiError(400, message, name, "unknown_parameter")
        note_no_effect(*(_INDEX.sub("[]", path) for path in idle))
        return clean


@dataclass(frozen=True)
class BodyForm:
    """The body of an endpoint's requests.

    Args:
        fields: those that are refused.
    """

    types: BodyTypes
    fields: Mapping[str, Refused]


async def read_body(request: Request, form: BodyForm, config: ServeConfig) -> dict[str, Any]:
    """The body, as `BodyTypes.check` gives it.

    Raises ApiError for a body that is not a JSON object, for fields that are missing or cannot be honoured, and for values of
    another type.
    """
    body = _object(await _raw(request))
    for name, value in body.items():
        if is_deeper(value, config.max_schema_depth + _LEVELS):
            raise ApiError(400, f"{name!r:.80} is nested more deeply than any request needs; send a flatter value", name[:80])
    check_fields(body, form.fields)
    return form.types.check(body, config.strict_fields)


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Refused]) -> None:
    """Raise ApiError for the first field of ``body`` that ``fields`` refuses."""
    for name, value in body.items():
        refused = fields.get(name)
        # True equals 1 to Python, and is another value to a client.
        if refused is not None and (isinstance(value, bool), value) not in [(isinstance(a, bool), a) for a in refused.accepts]:
            raise ApiError(400, f"{name} is not supported: {refused.reason}", name, "unsupported_parameter")


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


def _cleaned(value: Any, parsed: Any, at: str, idle: list[str]) -> Any:
    """``value`` with the keys that its model ``parsed`` has, in the client's order; the paths of others are added to ``idle``."""
    if isinstance(parsed, list) and parsed and isinstance(parsed[0], Part):
        return [_cleaned(item, part, f"{at}[{i}]", idle) for i, (item, part) in enumerate(zip(value, parsed, strict=True))]
    if not isinstance(parsed, Part):
        return value
    names = {field.alias or name: name for name, field in type(parsed).model_fields.items()}
    items = {key: (f"{at}.{key}" if at else key, item) for key, item in value.items() if item is not None}
    if parsed.model_config["extra"] == "allow":
        idle += [path for key, (path, _) in items.items() if key not in names]
    return {key: _cleaned(item, getattr(parsed, names[key]), path, idle) for key, (path, item) in items.items() if key in names}


def _type_error(error: ValidationError) -> ApiError:
    """What is wrong with the first field that is."""
    detail = error.errors(include_url=False)[0]
    kind = detail["type"]
    value = detail["input"]
    path = _path(detail["loc"])
    expected = detail["msg"].removeprefix("Input should be ")
    if kind == "union_tag_invalid":
        tag = detail["ctx"]["tag"][1:-1]
        tags = re.findall("<(.*?)>", detail["ctx"]["expected_tags"])
        key = tag.partition("=")[0]
        if isinstance(value, dict) and any("=" in other for other in tags):
            kind = "missing" if value.get(key) is None else kind
            value = value.get(key)
            path = f"{path}.{key}"
            tags = [repr(other.partition("=")[2]) for other in tags if "=" in other]
        expected = " or ".join(dict.fromkeys("an object" if "=" in other else other for other in tags))
    elif kind == "model_type":
        expected = "an object"
    if kind == "missing":
        return ApiError(400, f"{path} is missing; give a value for it", path, "missing_required_parameter")
    shown = _KINDS[type(value)] if isinstance(value, dict | list) else f"{value!r:.60}"
    kind = _KINDS[str] if isinstance(value, str) and path.rpartition(".")[2] not in ("type", "role") else shown
    logged = f"{path} is {kind}, expected {expected}"
    return ApiError(400, f"{path} is {shown}, expected {expected}", path, "invalid_type", logged=logged)


def _path(steps: Iterable[int | str]) -> str:
    """The path of keys and indices, as in ``messages[0].content``, without the tags of `OneOf`."""
    keys = [step for step in steps if isinstance(step, int) or not step.startswith("<")]
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
