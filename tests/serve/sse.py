"""Server-sent events, parsed from the bytes of an answer."""

import json
from typing import Any

import httpx


def raw_events(http: httpx.Client, path: str, body: dict[str, Any]) -> bytes:
    """The bytes of the streamed answer to ``body``."""
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.content


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """The documents of ``raw``. Raises AssertionError where it is anything but ``data: {…}`` events and a last [DONE]."""
    events = raw.decode("utf-8").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-2:]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
