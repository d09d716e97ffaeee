"""Finds what tide_plugins adds to the runtime, by entry point: the runtime imports no package above it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from tide_runtime.errors import TargetError

GROUP = "tide_runtime.plugins"


def plugin(name: str) -> Any:
    """The object that an installed package registers as ``name`` in the group ``tide_runtime.plugins``.

    Raises TargetError when no package does, or when one that it needs is missing.
    """
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is None:
        raise TargetError(f"no installed package provides the plugin {name!r}; install tide-llm with its plugins")
    try:
        return found.load()
    except ImportError as error:
        raise TargetError(f"the plugin {name!r} cannot be imported ({error}); pip install 'tide-llm[kernels]'") from error
