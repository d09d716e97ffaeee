"""API keys: ``Authorization: Bearer KEY``."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tide_serve.errors import ApiError
from tide_serve.observer import current_record
from tide_serve.safety.paths import needs_key
from tide_serve.safety.refusal import refuse

_ID_CHARS = 8


class RequireKey:
    """Refuses requests without one of ``keys`` with 401, and notes which client a request is from.

    Args:
        keys: none: no key is needed, and a client is its address.
        open_page: whether the chat page's files are served without a key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_page: bool) -> None:
        self._app, self._open_page = app, open_page
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client, error = self._client(scope)
            record = current_record.get()
            if record is not None:
                record.client = client
            if error is not None and needs_key(scope, self._open_page):
                if record is not None:
                    record.headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110, section 15.5.2
                await refuse(error, "api_key", scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> tuple[str | None, ApiError | None]:
        """Who sent the request, and what is wrong with the key."""
        if not self._digests:
            return (scope.get("client") or ("local",))[0], None
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key:
            return None, _refusal("no API key was sent; add the header 'Authorization: Bearer KEY'")
        digest = sha256(key.strip().encode()).digest()
        if not is_one_of(digest, self._digests):
            return None, _refusal("the API key is wrong; ask the operator of this server for one")
        return digest.hex()[:_ID_CHARS], None


def is_one_of(digest: bytes, known: Sequence[bytes]) -> bool:
    """Whether ``digest`` is in ``known``, in a time that depends on neither."""
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
