"""Logs as lines of JSON on stderr, without texts of requests."""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

from tide_serve.observe.request_record import current_record


class JsonFormatter(logging.Formatter):
    """A log record as a line of JSON.

    Args:
        log_text: show the messages of exceptions. They may quote a prompt or an output.
    """

    def __init__(self, log_text: bool) -> None:
        super().__init__()
        self._log_text = log_text

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = current_record.get()
        if request is not None:
            fields["id"] = request.id
        if record.exc_info is not None and (error := record.exc_info[1]) is not None:
            fields["error"] = self._error(error)
        return json.dumps(fields)

    def _error(self, error: BaseException) -> dict[str, Any]:
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        shown: dict[str, Any] = {"class": type(error).__name__, "frames": frames}
        if self._log_text:
            shown["message"] = str(error)
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return shown if cause is None else {**shown, "cause": self._error(cause)}


def log_to_stderr(log_text: bool) -> None:
    """Send the server's and uvicorn's logs to stderr. For the process of ``tide-serve``; an embedding service has its own."""
    lines, access = logging.StreamHandler(), logging.StreamHandler()
    lines.setFormatter(JsonFormatter(log_text))
    access.setFormatter(logging.Formatter("%(message)s"))  # already JSON
    for name, handler, level in (
        ("tide_serve", lines, logging.INFO),
        ("tide_serve.access", access, logging.INFO),
        ("uvicorn", lines, logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
