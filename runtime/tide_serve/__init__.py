"""An HTTP server for bundles that clients of OpenAI's API use unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tide_serve.config import ServeConfig

if TYPE_CHECKING:
    from tide_serve.api.app import make_app

__all__ = ["ServeConfig", "make_app"]


def __getattr__(name: str) -> Any:
    """Import the application when it is first used: `tide-serve --help` must not wait for FastAPI."""
    if name != "make_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tide_serve.api.app import make_app

    return make_app
