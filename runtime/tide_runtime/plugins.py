"""What installed packages add, by entry point: the runtime imports no package above it, and needs to know none outside TIDE.

The groups of `EXTENSIONS` are open to every package (docs/extending.md); `tide_runtime.plugins` is for tide_plugins.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tide_runtime.errors import ParamsError, TargetError

GROUP = "tide_runtime.plugins"
HEADS, ROUTERS, DRAFTERS, PASSES = "tide.exit_heads", "tide.routers", "tide.drafters", "tide.passes"
EXTENSIONS = {HEADS: "exit head", ROUTERS: "router", DRAFTERS: "drafter", PASSES: "graph pass"}


def plugin(name: str) -> Any:
    """The object that an installed package registers as ``name`` in the group ``tide_runtime.plugins``.

    Raises TargetError when no package does, or when one that it needs is missing.
    """
    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    if entry is None:
        raise TargetError(f"no installed package provides the plugin {name!r}; install tide-llm with its plugins")
    try:
        return entry.load()
    except ImportError as error:
        raise TargetError(f"the plugin {name!r} cannot be imported ({error}); pip install 'tide-llm[kernels]'") from error


def installed(group: str) -> dict[str, EntryPoint]:
    """What packages outside TIDE register in one of the groups of `EXTENSIONS`, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def extension(group: str, name: str) -> Any:
    """What an installed package registers as ``name``.

    Raises ParamsError, with the registered names, when there is none, and when it cannot be imported.
    """
    entry = installed(group).get(name)
    if entry is None:
        raise ParamsError(f"there is no {EXTENSIONS[group]} {name!r}; known are {known(group)}")
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ParamsError(f"the {EXTENSIONS[group]} {name} of {package_of(entry)} cannot be imported: {error}") from error


def known(group: str, ours: Iterable[str] = ()) -> str:
    """The names that are known and how one is added, for messages about an unknown name."""
    names = ", ".join([*ours, *installed(group)]) or "none"
    return f"{names}; a package adds one by an entry point of {group} (docs/extending.md)"


def package_of(entry: EntryPoint) -> str:
    """Name and version of the package that registers ``entry``."""
    assert entry.dist is not None, "only an entry point that was made by hand has no package"
    return f"{entry.dist.name} {entry.dist.version}"
