"""Parts of chat messages that have two forms: content as text or parts, arguments of calls as an object or text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def joined_parts(content: str | Iterable[Mapping[str, Any]]) -> str:
    """The text of a message's content, which may be parts."""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def arguments_object(arguments: Any) -> Any:
    """Arguments of a call as an object; as they are where they are none in JSON."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
