"""A request as the ingress sends it to a replica, and the key by which requests with a common beginning meet again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from starlette.types import Scope

from tide_serve.observe.request_record import current_record
from tide_serve.request.messages_as_chat import ACCOUNTS

OPENING_CHARS = 1024  # characters of a plain prompt that choose the replica
OPENING_TOKENS = 256
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
          "client", "server")  # fmt: skip


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request that has been read to its end.

    Args:
        scope: the parts of the ASGI scope that cross processes.
        opening: equal for requests that begin alike, see `opening`; empty: any replica will do.
    """

    scope: dict[str, Any]
    body: bytes
    opening: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> ForwardedRequest:
        """The request with the id under which the ingress logs it, so that the replica's log has the same."""
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        record = current_record.get()
        if record is not None:
            headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
            kept["headers"] = [*headers, (b"x-request-id", record.id.encode())]
        return cls(kept, body, opening(body))


def opening(body: bytes) -> str:
    """A digest of how a JSON request's prompt begins, and of its ``cache_salt``; empty where it holds none.

    A chat begins with its messages up to the first one of the user: they stay the same in every turn of a conversation, while
    conversations that share a long system prompt still spread over the replicas. Other prompts begin with their first
    characters or tokens.
    """
    try:
        request = json.loads(body)
        beginning = _beginning(request) if isinstance(request, dict) else None
        text = json.dumps([request.get("cache_salt"), beginning]) if beginning else ""
    except (ValueError, RecursionError):  # a replica refuses it, and says why
        return ""
    return blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def _beginning(request: dict[str, Any]) -> Any:
    messages = request.get("messages") or request.get("input")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
        system = request.get("instructions") or request.get("system")
        return [_said(system), [_said(m) for m in messages[: users[0] + 1 if users else None]]] if messages else None
    prompt = messages or request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # of several prompts the first one decides
    if isinstance(prompt, str):
        return prompt[:OPENING_CHARS]
    return prompt[:OPENING_TOKENS] if isinstance(prompt, list) else None


def _said(part: Any) -> Any:
    """``part`` without what clients of Anthropic's API change from turn to turn: marks of where to cache, and `ACCOUNTS`."""
    if isinstance(part, list):
        return [_said(each) for each in part]
    if isinstance(part, dict):
        return {key: _said(value) for key, value in part.items() if key != "cache_control"}
    return ACCOUNTS.sub("", part) if isinstance(part, str) else part
