"""TensorRT's log: keep errors, because TensorRT may report success for a wrong network and only log an error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tide_runtime.errors import TargetError


def build_log(trt: Any) -> Any:
    """A logger of module ``trt`` that keeps error lines in its list ``errors`` and drops the rest."""

    class BuildLog(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            with suppress(KeyboardInterrupt):  # the caller is C++; the build ends after its current step
                if severity <= trt.ILogger.ERROR:
                    self.errors.append(" ".join(message.split()))

    return BuildLog()


def require_no_errors(log: Any, doing: str) -> None:
    """Raise TargetError with the log's errors, if any."""
    if log.errors:
        raise TargetError(f"{doing}: TensorRT reports {'; '.join(log.errors)[:2000]}. Please report the model's config")
