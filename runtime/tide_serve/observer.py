"""What the server notes of each HTTP request, and the hooks of whatever reports it elsewhere, such as traces."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Protocol

from tide_runtime import Generation


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request, from its headers to the end of its answer.

    Args:
        id: of the request, as in the header ``X-Request-Id``.
        began_ns, began: Unix time in nanoseconds, and `perf_counter` seconds.
        trace_headers: the W3C headers ``traceparent`` and ``tracestate`` where the client sent them.
        client: the key's id (a hash), or the client's address where no key is needed.
        route: the declared path that answered; "none" where none did.
        status: of the answer; 499 where the request ended before it began; 0 as long as it has not begun.
        refused: why the request was refused before it reached a route, in one word; None: it was not.
        aborted: the answer was not completed: the client left, or the server failed or ended.
        headers: added to the answer.
        request_text, output_texts: only with ``ServeConfig.log_text``.
    """

    id: str
    method: str
    path: str
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    began_ns: int = field(default_factory=time_ns)
    began: float = field(default_factory=perf_counter)
    client: str | None = None
    route: str = "none"
    status: int = 0
    refused: str | None = None
    aborted: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    request_text: str | None = None
    output_texts: list[str] = field(default_factory=list)


class RequestObserver(Protocol):
    """Called in the event loop's thread, so every hook must return at once. Probes (``/health``, …) are left out."""

    def began(self, record: RequestRecord) -> None:
        """A request's headers have come."""

    def generated(self, record: RequestRecord, generation: Generation) -> None:
        """One of the request's generations has ended."""

    def ended(self, record: RequestRecord) -> None:
        """The answer is complete, or was aborted."""

    def close(self) -> None:
        """The server ends."""


class NoObserver:
    """Reports nothing."""

    def began(self, record: RequestRecord) -> None: ...

    def generated(self, record: RequestRecord, generation: Generation) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...

    def close(self) -> None: ...


# The request that the running task answers; tasks that it starts inherit it.
current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)
