"""Fields of vLLM, llama.cpp, Ollama and Qwen's own API in the terms of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tide_serve.errors import ApiError

_FORMAT = "response_format"


def in_openais_terms(body: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[str], str]]:
    """``body`` in those terms, and what gives the name by which the client has set a field.

    Raises ApiError where two fields set the same differently, and for a grammar that cannot be read.
    """
    chat = dict(body)
    names: dict[str, str] = {}
    for name, field, value in _renamed(body):
        chat.pop(name.partition(".")[0], None)
        if field in chat and chat[field] != value:
            raise ApiError(400, f"{name} contradicts {names.get(field, field)}; give one of them", name)
        chat[field], names[field] = value, name
    return chat, lambda field: names.get(field, field)


def _renamed(body: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(name, OpenAI's name or an extension's, its value) of each field of another server."""
    found: list[tuple[str, str, Any]] = []
    if "repeat_penalty" in body:
        found.append(("repeat_penalty", "repetition_penalty", body["repeat_penalty"]))
    if "enable_thinking" in body:
        kwargs = body.get("chat_template_kwargs", {}) | {"enable_thinking": body["enable_thinking"]}
        found.append(("enable_thinking", "chat_template_kwargs", kwargs))
    if (think := body.get("think")) is not None:
        is_effort = isinstance(think, str)
        found.append(("think", "reasoning_effort" if is_effort else "reasoning", think if is_effort else {"enabled": think}))
    if "thinking" in body:  # DeepSeek's and GLM's
        found.append(("thinking", "reasoning", {"enabled": body["thinking"].get("type") != "disabled"}))
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "grammar"):
        if name in body:
            found.append((name, _FORMAT, _format(name, name.removeprefix("guided_"), body[name])))
    for kind, value in body.get("structured_outputs", {}).items():
        found.append((f"structured_outputs.{kind}", _FORMAT, _format(f"structured_outputs.{kind}", kind, value)))
    return found


def _format(name: str, kind: str, value: Any) -> dict[str, Any]:
    """The ``response_format`` that means the same."""
    if kind == "regex":
        return {"type": "regex", "pattern": value}
    if kind == "choice":
        return {"type": "regex", "pattern": "|".join(map(re.escape, value))}
    if kind == "json_object":
        return {"type": "json_object" if value else "text"}
    try:
        if kind == "grammar":
            from llguidance.gbnf_to_lark import any_to_lark  # the extra may be missing

            return {"type": "lark", "grammar": any_to_lark(value)}
        schema = json.loads(value) if isinstance(value, str) else value
    except Exception as error:  # the converter's own errors have no class in common
        message, logged = f"{name} cannot be read ({error!s:.200}); give another", f"{name} cannot be read"
        raise ApiError(400, message, name, "invalid_grammar", logged=logged) from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
