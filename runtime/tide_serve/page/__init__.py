"""The chat page at ``/``: files without a build step, and the routes that serve them."""

from tide_serve.page.routes import page_routes

__all__ = ["page_routes"]
