"""The Host header, checked against DNS rebinding.

A web page may let its own name resolve to 127.0.0.1 after it was loaded. Its browser then takes this server for a part of that
page and lets its scripts read the answers, without CORS. The requests still name the page's host.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tide_serve.errors import ApiError
from tide_serve.safety.refusal import refuse


class CheckHost:
    """Refuses requests for another host with 421 (RFC 9110, section 15.5.20).

    Args:
        names: that are served besides ``localhost`` and loopback addresses, with any port.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_served(Headers(scope=scope).getlist("host")):
            message = "the header Host names another server; use localhost, or start the server with --allowed-host NAME"
            await refuse(ApiError(421, message, code="wrong_host"), "host", scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_served(self, hosts: list[str]) -> bool:
        """Whether there is one Host, as RFC 9112, section 3.2, requires, and it is this server."""
        if len(hosts) != 1:
            return False
        name = _without_port(hosts[0]).lower()
        return name in self._names or _is_loopback(name)


def _without_port(host: str) -> str:
    """``host`` without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
