"""Paths that are treated in a way of their own."""

from __future__ import annotations

from starlette.types import Scope

PROBES = frozenset({"/health", "/ready", "/metrics"})  # answered while draining, not limited, not logged when all is well
_KEYLESS = frozenset({"/health", "/ready"})


def path_of(scope: Scope) -> str:
    """The path of a request as the routes declare it, without the mount point of the application."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def needs_key(scope: Scope, open_page: bool) -> bool:
    """Whether a request needs an API key.

    ``open_page``: serve the chat page's own files without one; a browser cannot send a key when it opens a page, and the
    page asks for it.
    """
    path = path_of(scope)
    if path in _KEYLESS:
        return False
    return not (open_page and scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith("/page/")))
