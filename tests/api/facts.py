"""Facts about values for the inference of TensorRT API uses in our files: sets of the classes below.

A value may be the TensorRT module, a class of it, an instance, a method of one, a function or class of ours, or a collection of
such. What cannot be known (results that the bindings' docstrings leave open) has no facts.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Module:
    """The TensorRT module."""


@dataclass(frozen=True)
class Class:
    """A class of TensorRT; with ``method``, a method of it or of an instance."""

    type: type
    method: str = ""


@dataclass(frozen=True)
class Instance:
    type: type


@dataclass(frozen=True)
class Items:
    """A collection's elements, or a dictionary's values."""

    facts: frozenset[Any]


@dataclass(eq=False)
class Scope:
    """A file, class or function of TIDE: names, statements, return values; for a class also the fields of its instances."""

    node: Any
    file: Path
    parent: Scope | None
    names: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    returns: set[Any] = field(default_factory=set)
    bases: set[Any] = field(default_factory=set)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def look_up(self, name: str) -> set[Any]:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or not scope.is_class):
                return scope.names[name]
            scope = scope.parent
        return set()

    @property
    def decorators(self) -> set[str]:
        return {ast.unparse(d).split("(")[0].split(".")[-1] for d in getattr(self.node, "decorator_list", [])}


@dataclass(frozen=True)
class Object:
    """An instance of a TIDE class."""

    scope: Scope


Facts = set[Any]


def elements(facts: Facts) -> Facts:
    return set().union(*(fact.facts for fact in facts if isinstance(fact, Items)))
