"""Tools in the prompt of a model whose chat template does not know them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tide_serve.tool_calls import CLOSING, OPENING

_DESCRIPTION = """You can call these functions:
{functions}
To call one, answer with its name and arguments as JSON, for each call:
{opening}
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": VALUE}}}}
{closing}
The results come between <tool_response> and </tool_response>. Answer in plain text when no call is needed."""


def with_tool_texts(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with ``tools`` described in the system message, and with the calls and results of earlier turns as text."""
    written = [_as_text(message) for message in messages]
    if not tools:
        return written
    functions = "\n".join(json.dumps(_shown(tool["function"]), ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(functions=functions, opening=OPENING, closing=CLOSING)
    if written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{description}".strip()}, *written[1:]]
    return [{"role": "system", "content": description}, *written]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    blocks = [f"{OPENING}\n{call}\n{CLOSING}" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"], *blocks] if message["content"] else blocks)}


def _shown(function: dict[str, Any]) -> dict[str, Any]:
    return {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}
