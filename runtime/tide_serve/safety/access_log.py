"""One line of JSON for each request, on the logger ``tide_serve.access``. It holds neither keys nor, unless asked for, texts."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from tide_serve.observer import RequestRecord

_log = logging.getLogger("tide_serve.access")
_PATH_CHARS = 200


def log_access(record: RequestRecord, level: int) -> None:
    """Log a request that has ended."""
    if _log.isEnabledFor(level):
        _log.log(level, "%s", json.dumps(_fields(record)))


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.began_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "id": record.id,
        "method": record.method,
        "path": record.path[:_PATH_CHARS],
        "status": record.status,
        "ms": round(1e3 * (perf_counter() - record.began), 1),
        "client": record.client,
    }
    if record.refused is not None:
        fields["refused"] = record.refused
    if record.aborted:
        fields["aborted"] = True
    if record.prompt_tokens:
        fields |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
    if record.request_text is not None:
        fields |= {"request": record.request_text, "outputs": record.output_texts}
    return fields
