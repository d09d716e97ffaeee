"""Nesting of JSON, measured without recursion, as a client may send any number of levels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_deeper(value: Any, limit: int) -> bool:
    """Whether ``value`` has more than ``limit`` levels of objects and lists."""
    level = _containers([value])
    for _ in range(limit):
        level = [child for parent in level for child in _containers(parent.values() if isinstance(parent, dict) else parent)]
    return bool(level)


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, dict | list)]
