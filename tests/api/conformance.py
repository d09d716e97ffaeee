"""Check of every attribute, call and assignment that `inference` finds against TensorRT's real classes."""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api.facts import Class, Facts, Instance, Module, Object, Scope
from api.inference import Inference
from api.signatures import mismatch, signatures


@dataclass
class Conformance:
    """``problems``: messages; ``checked``: every `attribute of class` that was compared with the bindings."""

    problems: list[str] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)


def check(trt: Any, files: list[Path]) -> Conformance:
    found, result = Inference(trt, files), Conformance()
    for (file, attribute), facts in found.attributes.items():
        _attribute(trt, f"{file.name}:{attribute.lineno}", attribute, facts, result)
    for (file, node), (callees, positional, named) in found.calls.items():
        _call(trt, f"{file.name}:{node.lineno}", node, callees, positional, named, result)
    for scope in found.scopes.values():
        for base in scope.bases:
            if isinstance(base, Class):
                _subclass(scope, base.type, result)
    result.problems = sorted(set(result.problems))
    return result


def _attribute(trt: Any, place: str, node: ast.Attribute, facts: Facts, result: Conformance) -> None:
    name = node.attr
    owners = [trt if isinstance(fact, Module) else fact.type for fact in facts if _is_binding(fact)]
    if not owners or name.startswith("__"):
        return
    holders = [owner for owner in owners if hasattr(owner, name)]
    titles = " or ".join(sorted({owner.__name__ for owner in owners}))
    result.checked.add(f"{name} of {titles}")
    if not holders and not any(isinstance(fact, Object) for fact in facts):
        result.problems.append(f"{place}: {titles} has no {name}")
    properties = [value for value in (getattr(holder, name) for holder in holders) if isinstance(value, property)]
    if isinstance(node.ctx, ast.Store) and properties and all(value.fset is None for value in properties):
        result.problems.append(f"{place}: {name} of {titles} cannot be set")


def _is_binding(fact: Any) -> bool:
    if isinstance(fact, Class):
        return not fact.method
    return isinstance(fact, Module) or (isinstance(fact, Instance) and fact.type not in (str, int, bool, float, type(None)))


def _call(
    trt: Any, place: str, node: ast.Call, callees: Facts, positional: list[Facts], named: dict[str, Facts], result: Conformance
) -> None:
    if any(isinstance(argument, ast.Starred) for argument in node.args) or any(not k.arg for k in node.keywords):
        return
    for fact in callees:
        if not isinstance(fact, Class) or fact.type.__module__ == "builtins":
            continue
        function = getattr(fact.type, fact.method or "__init__")
        given = positional[1:] if fact.method == "__init__" else positional
        overloads = signatures(function)
        reasons = [mismatch(trt, s, [_types(f) for f in given], {k: _types(f) for k, f in named.items()}) for s in overloads]
        title = f"{fact.type.__name__}.{fact.method or '__init__'}"
        result.checked.add(f"call of {title}")
        if reasons and all(reasons):
            result.problems.append(f"{place}: {title} {reasons[0]}")


def _types(facts: Facts) -> set[type] | None:
    """Possible classes of a value; None: unknown."""
    types = {fact.type for fact in facts if isinstance(fact, Instance)}
    for fact in facts:
        if isinstance(fact, Object):
            types |= {base.type for base in fact.scope.bases if isinstance(base, Class)}
    return types or None


def _subclass(scope: Scope, base: type, result: Conformance) -> None:
    """Check that methods which TensorRT calls override one of ``base`` with the same number of parameters."""
    for node in scope.node.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        result.checked.add(f"override of {base.__name__}.{node.name}")
        place, title = f"{scope.file.name}:{node.lineno}", f"{base.__name__}.{node.name}"
        if not hasattr(base, node.name):
            result.problems.append(f"{place}: {title} overrides nothing")
            continue
        overloads = signatures(getattr(base, node.name))
        count = len(node.args.args) - 1
        if overloads and all(len(s.parameters) != count for s in overloads):
            result.problems.append(f"{place}: {title} is called with {len(overloads[0].parameters)} arguments, takes {count}")
