"""The checks of a request before it reaches a route: pure ASGI middlewares that pass streamed chunks on at once."""

from __future__ import annotations

import asyncio
import hmac
import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from ipaddress import ip_address
from time import monotonic
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tide_serve.errors import ApiError, path_of
from tide_serve.http.recorder import PROBES, RequestRecorder
from tide_serve.observe.request_record import ServerState, current_record

_SHOWN_TO_SCRIPTS = ["X-Request-Id", "Retry-After"] + [f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")]
_KEYLESS = frozenset({"/health", "/ready"})
_KEY_ID_CHARS = 8
_MAX_BUCKETS = 10_000  # clients whose buckets are kept; without keys every address is a client


def guard(app: ASGIApp, state: ServerState) -> ASGIApp:
    """``app`` with all checks, which run in this order:

    1. `RequestRecorder`: request id, security headers, log line and metrics, for refused requests as well.
    2. `CheckHost`, only with ``allowed_hosts``: 421 for a request to another host.
    3. CORS, only with ``cors_origins``: a browser's preflight carries no key, and a refusal must be readable by its page.
    4. `RefuseWhileDraining`: 503 once the server is ending.
    5. `RequireKey`: 401. Nothing of a body is read before the key is known to be right.
    6. `LimitClients`: 429 for a client with too many requests.
    7. `ReadBody`: 413 or 408; the routes get the whole body at once, and check what is in it.
    """
    config = state.config
    app = ReadBody(app, config.max_body_bytes, config.body_timeout, config.log_text)
    app = LimitClients(app, config.requests_at_once_per_key, config.requests_per_minute_per_key)
    app = RequireKey(app, config.api_keys, open_page=config.page)
    app = RefuseWhileDraining(app, state)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_SHOWN_TO_SCRIPTS,
        )
    if config.allowed_hosts is not None:
        app = CheckHost(app, config.allowed_hosts)
    return RequestRecorder(app, state)


class Refusal(NamedTuple):
    """An answer instead of the route's.

    Args:
        reason: one word for the metrics.
        close: end the connection, for example so that the client's next one goes to another server.
    """

    error: ApiError
    reason: str
    close: bool = False

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current_record.get()
        if record is not None:
            record.refused = self.reason
        answer = self.error.response(scope)
        if self.close:
            answer.headers["Connection"] = "close"
        await answer(scope, receive, send)


class Check(ABC):
    """A middleware that refuses requests by their headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.send)(scope, receive, send)

    @abstractmethod
    def _refusal(self, scope: Scope) -> Refusal | None:
        """None: the request passes."""


class CheckHost(Check):
    """Refuses requests for another host with 421 (RFC 9110, section 15.5.20), against DNS rebinding.

    A web page may let its own name resolve to 127.0.0.1 after it was loaded. Its browser then takes this server for a part of
    that page and lets its scripts read the answers, without CORS. The requests still name the page's host.

    Args:
        names: served in addition to ``localhost`` and loopback addresses, with any port.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        super().__init__(app)
        self._names = {"localhost", *(name.lower() for name in names)}

    def _refusal(self, scope: Scope) -> Refusal | None:
        if self._is_served(Headers(scope=scope).getlist("host")):
            return None
        message = "the header Host names another server; use localhost, or start the server with --allowed-host NAME"
        return Refusal(ApiError(421, message, code="wrong_host"), "host")

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


class RefuseWhileDraining(Check):
    """Answers new requests with 503 once ``state.draining`` is set; those in progress go on."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        super().__init__(app)
        self._state = state

    def _refusal(self, scope: Scope) -> Refusal | None:
        if not self._state.draining or path_of(scope) in PROBES:
            return None
        error = ApiError(503, "the server is ending; send the request again", code="draining", retry_after=1)
        return Refusal(error, "draining", close=True)


class RequireKey(Check):
    """Refuses requests without one of ``keys`` with 401, and notes the request's client.

    A key comes as ``Authorization: Bearer KEY``, or as Anthropic's clients send it: ``X-Api-Key: KEY``.

    Args:
        keys: none: no key is needed, and a client is its address.
        open_page: the chat page's files are served without a key, as a browser cannot send one when it opens a page.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_page: bool) -> None:
        super().__init__(app)
        self._open_page = open_page
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def _refusal(self, scope: Scope) -> Refusal | None:
        client, error = self._client(scope)
        record = current_record.get()
        if record is not None:
            record.client = client
        if error is None or not self._needs_key(scope):
            return None
        if record is not None:
            record.headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110, section 15.5.2
        return Refusal(error, "api_key")

    def _client(self, scope: Scope) -> tuple[str | None, ApiError | None]:
        """The sender of the request, and what is wrong with the key."""
        if not self._digests:
            return (scope.get("client") or ("local",))[0], None
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key:
            key = headers.get("x-api-key", "")
        if not key:
            return None, _key_error("no API key was sent; add the header 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'")
        digest = sha256(key.strip().encode()).digest()
        if not is_one_of(digest, self._digests):
            return None, _key_error("the API key is wrong; ask the operator of this server for one")
        return digest.hex()[:_KEY_ID_CHARS], None

    def _needs_key(self, scope: Scope) -> bool:
        path = path_of(scope)
        is_page = scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith("/page/"))
        return path not in _KEYLESS and not (self._open_page and is_page)


def is_one_of(digest: bytes, known: Sequence[bytes]) -> bool:
    """Whether ``digest`` is in ``known``, in a time that depends on neither."""
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found


def _key_error(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


class TokenBuckets:
    """A bucket of ``per_minute`` requests for each client, which fills up again at that rate.

    Args:
        clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._rate = per_minute / 60
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client → requests left, and when

    def spend(self, client: str) -> tuple[bool, float]:
        """Whether ``client`` may send a request now, and the requests that it has left, a fraction included."""
        now = self._clock()
        left, since = self._buckets.pop(client, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - since) * self._rate)
        allowed = left >= 1
        left -= allowed
        self._buckets[client] = (left, now)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return allowed, left

    def seconds_until(self, requests: float, left: float) -> float:
        """Seconds until a bucket with ``left`` requests has ``requests``."""
        return max(0.0, requests - left) / self._rate


class LimitClients:
    """Refuses what is over a client's limits with 429; the answers tell the limit as OpenAI's do (``x-ratelimit-…``).

    Args:
        at_once: requests in progress, up to the end of their answers.
        per_minute: 0: no limit.
    """

    def __init__(self, app: ASGIApp, at_once: int, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._app, self._at_once = app, at_once
        self._buckets = TokenBuckets(per_minute, clock) if per_minute else None
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        record = current_record.get()
        client = (record.client if record is not None else None) or "anyone"
        refusal = self._refusal(client)
        if refusal is not None:
            await refusal.send(scope, receive, send)
            return
        self._running[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    def _refusal(self, client: str) -> Refusal | None:
        """The refusal of ``client``'s next request; None: it may run."""
        if self._running[client] >= self._at_once:
            message = f"{self._at_once} requests are in progress, as many as you may have at once; wait for one to end"
            return Refusal(ApiError(429, message, code="too_many_requests", retry_after=1), "requests_at_once")
        if self._buckets is None:
            return None
        allowed, left = self._buckets.spend(client)
        _tell_limit(self._buckets, left)
        if allowed:
            return None
        wait = math.ceil(self._buckets.seconds_until(1, left))
        message = f"you may send {self._buckets.per_minute} requests per minute; send the next one in {wait} s"
        return Refusal(ApiError(429, message, code="rate_limit_exceeded", retry_after=wait), "requests_per_minute")


def _tell_limit(buckets: TokenBuckets, left: float) -> None:
    """Add the limit, and the requests that are ``left``, to the headers of the answer."""
    record = current_record.get()
    if record is not None:
        figures = {
            "limit": str(buckets.per_minute),
            "remaining": str(int(left)),
            "reset": f"{buckets.seconds_until(buckets.per_minute, left):.3f}s",
        }
        record.headers += [(f"x-ratelimit-{name}-requests".encode(), value.encode()) for name, value in figures.items()]


class ReadBody:
    """Reads a request's body whole and passes it on in one piece, or refuses it.

    Args:
        max_bytes: larger ones are refused with 413, before they are read where the headers tell the size.
        timeout: seconds; slower ones are refused with 408.
        log_text: keep the body for the log.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float, log_text: bool = False) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._log_text = log_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        try:
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > self._max_bytes:
                raise self._too_large()
            body = await self._read(receive)
        except ApiError as error:
            # A slow client would go on sending for as long as it likes; the rest of a large body is discarded.
            await Refusal(error, error.code or "body", close=error.status == 408).send(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        record = current_record.get()
        if self._log_text and record is not None:
            record.request_text = body.decode(errors="replace")
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # the route's copy is the only one while it generates

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_whole, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None where the client left first. Raises ApiError."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            about = f"the body did not arrive within {self._timeout:g} s; send it without pauses"
            raise ApiError(408, about, code="body_timeout") from error

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_bytes} bytes; send less", code="body_too_large")


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
