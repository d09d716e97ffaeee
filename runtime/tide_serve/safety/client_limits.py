"""How much one client may ask for: requests at once, and requests per minute."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from tide_serve.errors import ApiError
from tide_serve.observer import current_record
from tide_serve.safety.paths import PROBES, path_of
from tide_serve.safety.refusal import refuse

_MOST_BUCKETS = 10_000  # clients whose buckets are kept; without keys every address is a client


class TokenBuckets:
    """A bucket of ``per_minute`` requests for each client, which fills up again at that rate.

    Args:
        clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._rate = per_minute / 60
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client → requests left, and when

    def take(self, client: str) -> tuple[bool, float]:
        """Whether ``client`` may send a request now, and the requests that it has left, a fraction included."""
        now = self._clock()
        left, since = self._buckets.pop(client, (float(self.per_minute), now))
        left = min(self.per_minute, left + (now - since) * self._rate)
        allowed = left >= 1
        left -= allowed
        self._buckets[client] = (left, now)
        if len(self._buckets) > _MOST_BUCKETS:
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
        refusal = self._over_limit(client)
        if refusal is not None:
            await refuse(*refusal, scope, receive, send)
            return
        self._running[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    def _over_limit(self, client: str) -> tuple[ApiError, str] | None:
        """The error for ``client``'s next request, and the limit that it is over; None: it may run."""
        if self._running[client] >= self._at_once:
            message = f"{self._at_once} requests are in progress, as many as you may have at once; wait for one to end"
            return ApiError(429, message, code="too_many_requests", retry_after=1), "requests_at_once"
        if self._buckets is None:
            return None
        allowed, left = self._buckets.take(client)
        self._tell(left)
        if allowed:
            return None
        wait = math.ceil(self._buckets.seconds_until(1, left))
        message = f"you may send {self._buckets.per_minute} requests per minute; send the next one in {wait} s"
        return ApiError(429, message, code="rate_limit_exceeded", retry_after=wait), "requests_per_minute"

    def _tell(self, left: float) -> None:
        record, buckets = current_record.get(), self._buckets
        if record is not None and buckets is not None:
            figures = {
                "limit": str(buckets.per_minute),
                "remaining": str(int(left)),
                "reset": f"{buckets.seconds_until(buckets.per_minute, left):.3f}s",
            }
            record.headers += [(f"x-ratelimit-{name}-requests".encode(), value.encode()) for name, value in figures.items()]
