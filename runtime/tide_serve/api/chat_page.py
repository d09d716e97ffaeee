"""Routes of the chat page: ``/`` and its files below ``/page``, which need no API key as they hold nothing of the model."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

from tide_serve.errors import ApiError

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles, pictures and connections of this server only: the text of a model cannot load or send anything.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page's routes. Its files are read once, here."""
    folder = Path(__file__).parents[1] / "page"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in _TYPES}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return await file("index.html")

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r}")
        return Response(files[name], headers=_HEADERS, media_type=_TYPES[Path(name).suffix])

    return router
