"""/v1/responses, in terms of /v1/chat/completions."""

from tide_serve.responses.routes import responses_routes

__all__ = ["responses_routes"]
