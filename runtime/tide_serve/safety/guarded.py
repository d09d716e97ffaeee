"""What the middlewares need of a server."""

from __future__ import annotations

from typing import Protocol

from tide_serve.config import ServeConfig
from tide_serve.observer import RequestObserver
from tide_serve.server_metrics import ServerMetrics


class Guarded(Protocol):
    """Limits and state of a server; `Service` is one, and so is a front that passes requests on."""

    config: ServeConfig
    draining: bool
    metrics: ServerMetrics
    observer: RequestObserver
