"""Logs on stderr, as lines of JSON or for people, without texts of requests."""

from __future__ import annotations

import json
import logging
import sys
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
        return json.dumps(self._fields(record))

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
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
        return fields

    def _error(self, error: BaseException) -> dict[str, Any]:
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        shown: dict[str, Any] = {"class": type(error).__name__, "frames": frames}
        if self._log_text:
            shown["message"] = str(error)
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return shown if cause is None else {**shown, "cause": self._error(cause)}


class TextFormatter(JsonFormatter):
    """A log record as a line for people: a request with its figures, or a message with what failed."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        if (request := getattr(record, "request", None)) is not None:
            return f"{time} {_request_line(dict(request))}"
        error = self._fields(record).get("error")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{time} {level}{record.getMessage()}" + ("" if error is None else f"\n{json.dumps(error, indent=1)}")


def _request_line(fields: dict[str, Any]) -> str:
    """Method, path, status, seconds, tokens; then other fields by their names."""
    parts = [f"{fields.pop('method')} {fields.pop('path')} {fields.pop('status')} in {fields.pop('ms') / 1e3:.2f} s"]
    if "prompt_tokens" in fields:
        cached = fields.pop("cached_tokens")
        parts += [
            f"prompt {fields.pop('prompt_tokens')} tokens" + (f" ({cached} cached)" if cached else ""),
            f"first token {fields.pop('first_token_ms'):.0f} ms",
            f"new {fields.pop('output_tokens')} tokens",
            f"{fields.pop('tokens_per_second')} tokens/s",
        ]
    rest = (f"{name}: {value}" for name, value in fields.items() if name not in ("time", "id", "client") and value is not None)
    return " · ".join([*parts, *rest])


def log_to_stderr(log_text: bool, log_format: str = "json") -> None:
    """Send the logs of engines, server and uvicorn to stderr, for the process of ``tide-serve``; other services have their own.

    Args:
        log_format: as `ServeConfig.log_format`; auto: text on a terminal, json elsewhere.
    """
    lines, access = logging.StreamHandler(), logging.StreamHandler()
    text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    lines.setFormatter(TextFormatter(log_text) if text else JsonFormatter(log_text))
    access.setFormatter(TextFormatter(log_text) if text else logging.Formatter("%(message)s"))  # which is JSON
    for name, handler, level in (
        ("tide_runtime", lines, logging.INFO),
        ("tide_serve", lines, logging.INFO),
        ("tide_serve.access", access, logging.INFO),
        ("uvicorn", lines, logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
