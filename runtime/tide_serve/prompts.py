"""Token ids of a request's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tide_runtime import Engine
from tide_runtime.errors import PromptError
from tide_runtime.text.message_parts import joined_parts

from tide_serve.errors import ApiError
from tide_serve.messages import template_messages, with_calls_as_text, with_tools_described
from tide_serve.off_loop import off_loop
from tide_serve.tools import ToolPlan


@dataclass(frozen=True)
class Prompt:
    """A prompt of /v1/completions. ``text``: as it was sent, or decoded from ids."""

    ids: list[int]
    text: str


async def chat_prompt(engine: Engine, messages: Sequence[dict[str, Any]], tools: ToolPlan) -> list[int]:
    """Token ids of a request's ``messages`` in the model's template, with ``tools``.

    Raises ApiError where a text model cannot take them, the template refuses them, or they are longer than the context.
    """
    if not messages:
        raise ApiError(400, "messages is empty; give at least one", "messages")
    turns = template_messages(messages)
    if not tools.calls_shown:
        turns = [with_calls_as_text(turn) for turn in turns]
    if tools.tools and not tools.shown:
        turns = with_tools_described(turns, tools.tools)
    extra = {"tools": tools.tools} if tools.tools and tools.shown else {}
    size = sum(len(joined_parts(turn["content"] or "")) for turn in turns)
    try:
        ids = await off_loop(size, _chat_ids, engine, turns, extra)
    except PromptError as error:
        raise ApiError(400, str(error), "messages") from error
    check_length(engine, ids, "messages")
    return ids


def _chat_ids(engine: Engine, turns: Sequence[dict[str, Any]], extra: dict[str, Any]) -> list[int]:
    text = engine.chat_text(turns, **extra)
    assert engine.tokenizer is not None
    _check_text(engine, text, "messages")
    return engine.tokenizer.encode(text, add_special_tokens=False)


def each_prompt(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a ``prompt`` field: text, a list of texts, token ids, or a list of them. Raises ApiError for none."""
    several = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not several:
        raise ApiError(400, "prompt is an empty list; give text or token ids", "prompt")
    return several


async def text_prompt(engine: Engine, prompt: str | list[int]) -> Prompt:
    """A prompt of text or token ids. Raises ApiError where the engine cannot take it."""
    try:
        ids = await off_loop(len(prompt), _ids, engine, prompt)
    except PromptError as error:
        raise ApiError(400, str(error), "prompt") from error
    return Prompt(ids, prompt if isinstance(prompt, str) else decoded(engine, ids))


def _ids(engine: Engine, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str) and engine.tokenizer is not None:
        _check_text(engine, prompt, "prompt")
        prompt = engine.tokenizer.encode(prompt)
    if isinstance(prompt, list):
        check_length(engine, prompt, "prompt")
    return engine.admission.token_ids(prompt)


def decoded(engine: Engine, ids: Sequence[int]) -> str:
    """The text of ``ids`` with special tokens; empty where the bundle has no tokenizer. Raises PromptError."""
    return engine.tokenizer.decode(ids, skip_special_tokens=False) if engine.tokenizer is not None else ""


def check_length(engine: Engine, ids: Sequence[int], param: str) -> None:
    """Raise ApiError for a prompt that is longer than the context."""
    if len(ids) > engine.manifest.max_seq_len:
        raise _too_long(engine, f"{len(ids)} tokens", param)


def _check_text(engine: Engine, text: str, param: str) -> None:
    """Raise ApiError for a text that is certainly longer than the context, before processor time is spent on its tokens."""
    context = engine.manifest.max_seq_len
    if engine.tokenizer is None or len(text) <= context:  # the vocabulary is looked through for long texts only
        return
    fewest = engine.tokenizer.bound.fewest_tokens(text)
    if fewest > context:
        raise _too_long(engine, f"at least {fewest} tokens", param)


def _too_long(engine: Engine, tokens: str, param: str) -> ApiError:
    message = f"{param}: {tokens}, the context holds {engine.manifest.max_seq_len}; shorten the text"
    return ApiError(400, message, param, "context_length_exceeded")


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
