"""Tools and results of clients in the form that a text model reads: other kinds are left out, and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tide_serve.observe.request_record import note_no_effect

Content = str | Sequence[Mapping[str, Any]]


def text_parts(content: Content) -> str | list[dict[str, Any]]:
    """What a call returned, as text. An image or a document is named, so that the model does not take the result for empty."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text_of(part)} for part in content]


def _text_of(part: Mapping[str, Any]) -> str:
    if isinstance(text := part.get("text"), str):
        return text
    source = part.get("source") or {}
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    kind = str(part["type"]).removeprefix("input_").removesuffix("_url").replace("_", " ")
    return f"[{kind} left out: this model reads text only]"


def functions_of(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions among ``tools``. Other kinds have no effect here, which the log says."""
    note_no_effect(*(f"tools[].type={tool['type']}" for tool in tools if tool["type"] != "function"))
    return [tool for tool in tools if tool["type"] == "function"]
