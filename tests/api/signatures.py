"""Signatures of TensorRT's bindings, parsed from the docstrings that pybind11 generates: `f(self: m.A, x: m.B = None) -> m.C`."""

import enum
import inspect
import re
from dataclasses import dataclass
from typing import Any

_PLAIN = {"str": str, "int": int, "bool": bool, "float": float, "SupportsInt": int, "SupportsIndex": int, "SupportsFloat": float}


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    required: bool
    variadic: bool = False


@dataclass(frozen=True)
class Signature:
    """A signature. ``parameters`` excludes ``self``; ``returns`` is the type as written."""

    parameters: tuple[Parameter, ...]
    returns: str


def split_outside_brackets(text: str) -> list[str]:
    """Split ``text`` at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>" and text[place - 1] != "-")
        if character == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _parameter(text: str) -> Parameter:
    name, _, rest = text.partition(":")
    kind, equals, _ = rest.partition(" = ")
    return Parameter(name.strip().lstrip("*"), kind.strip(), not equals, name.strip().startswith("*"))


def signatures(function: Any) -> list[Signature]:
    """All overloads; empty when the docstring has no signature."""
    found = []
    for line in (function.__doc__ or "").splitlines():
        match = re.fullmatch(r"(?:\d+\. )?\w*\((.*)\) -> (.+)", line.strip())
        if match is None:
            continue
        parameters = [_parameter(part) for part in split_outside_brackets(match[1]) if part not in ("/", "*")]
        if parameters and parameters[0].name in ("self", "arg0") and "." in parameters[0].type:
            parameters = parameters[1:]
        found.append(Signature(tuple(parameters), match[2].strip()))
    return found


def types_named(module: Any, text: str) -> tuple[set[type], bool]:
    """The classes of ``module`` in a type as written by pybind11, and whether it is a collection of them."""
    classes = set()
    for name in re.findall(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*", text):
        owner: Any = module
        for part in name.split("."):
            owner = getattr(owner, part, module if owner is module else None)  # leading parts are packages
        if inspect.isclass(owner):
            classes.add(owner)
    return classes, bool(re.match(r"(typing\.)?(List|list|Sequence|collections)", text))


def mismatch(module: Any, signature: Signature, positional: list[Any], named: dict[str, Any]) -> str:
    """Reason why a call does not match ``signature``; empty if it does.

    Args:
        positional: for each argument, a set of classes that it may be an instance of, or None if unknown.
    """
    parameters, taken = list(signature.parameters), dict(named)
    if any(parameter.variadic for parameter in parameters):
        return ""
    if len(positional) > len(parameters):
        return f"takes {len(parameters)} arguments, {len(positional)} given"
    for parameter, given in zip(parameters, positional, strict=False):
        if parameter.name in taken:
            return f"{parameter.name} given twice"
        taken[parameter.name] = given
    names = {parameter.name for parameter in parameters}
    if unknown := sorted(set(taken) - names):
        return f"has no argument {unknown[0]}"
    if missing := [p.name for p in parameters if p.required and p.name not in taken]:
        return f"lacks the argument {missing[0]}"
    wrong = [p for p in parameters if p.name in taken and not _accepts(module, p.type, taken[p.name])]
    return f"wants {wrong[0].type} as {wrong[0].name}" if wrong else ""


def _accepts(module: Any, text: str, given: set[type] | None) -> bool:
    if not given:
        return True
    plain = {_PLAIN[word] for word in re.findall(r"\w+", text) if word in _PLAIN}
    classes, _ = types_named(module, text)
    if not plain and not classes:
        return True
    if any(issubclass(one, bool) for one in given) and int in plain:
        return True
    return any(issubclass(one, tuple(plain | classes)) or (issubclass(one, enum.IntEnum) and int in plain) for one in given)
