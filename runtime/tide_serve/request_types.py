"""Checks a request's values against the parameter types of the openai package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import typing_extensions
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict, is_typeddict

from tide_serve.errors import ApiError

_STRICT = ConfigDict(extra="forbid", strict=True)
_TAGS = ("role", "type")  # keys whose value says which type of a union is meant
_MISSING = ("missing", "union_tag_not_found")


class RequestTypes:
    """The types of an endpoint's fields.

    Args:
        params: TypedDict of the openai package.
        extensions: types of further fields, and others than those of ``params``.

    ``required``: names of fields; ``adapters``: what checks each of them.
    """

    def __init__(self, params: type, extensions: Mapping[str, Any]) -> None:
        hints = typing_extensions.get_type_hints(params, include_extras=True)
        self.required = [name for name, hint in hints.items() if get_origin(hint) is Required]
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


@cache
def strict_type(hint: Any) -> Any:
    """``hint`` for a check of JSON values: unknown keys are errors, numbers are not made of strings, iterables are lists.

    pydantic checks an Iterable only when it is read, and takes unknown keys of a TypedDict without a word.
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
    """A field's type without Required, which says something about the whole body only."""
    return get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint


def _type_error(name: str, value: Any, error: ValidationError) -> ApiError:
    """What is wrong, about the deepest place that an error names: with a union there is one for each alternative."""
    found: dict[str, tuple[Any, list[Mapping[str, Any]]]] = {}
    for detail in error.errors(include_url=False):
        path, at = _place(name, value, detail)
        found.setdefault(path, (at, []))[1].append(detail)
    deepest = max(found, key=lambda path: path.count(".") + path.count("["))
    return ApiError(400, f"{deepest} {_wording(*found[deepest])}", deepest, "invalid_type")


def _place(name: str, value: Any, detail: Mapping[str, Any]) -> tuple[str, Any]:
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
