"""Token ids of a request's prompts: of chats in the model's template, and of texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tide_runtime import Engine
from tide_runtime.admission import ways_to_fit
from tide_runtime.errors import PromptError
from tide_runtime.text.message_parts import arguments_object, joined_parts

from tide_serve.errors import ApiError
from tide_serve.request.call_formats import HERMES, CallForm
from tide_serve.request.tool_results import text_parts
from tide_serve.request.tools import ToolPlan

Result = TypeVar("Result")
_LONG = 4096  # characters; encoding them takes about a millisecond
_CUT = "\ue010"  # a private-use character, which no template writes
_PASSED = ("name", "tool_call_id", "reasoning_content", "reasoning")  # keys of a message that templates read
_DESCRIPTION = """You can call these functions:
{functions}
To call one, answer with its name and arguments as JSON, for each call:
{example}
The results come between <tool_response> and </tool_response>. Answer in plain text when no call is needed."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. ``text``: the chat in the model's template; of /v1/completions as it was sent, or decoded from ids."""

    ids: list[int]
    text: str


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """``function(*arguments)``, which works on ``size`` characters: in a thread where that would hold up other streams."""
    return function(*arguments) if size < _LONG else await asyncio.to_thread(function, *arguments)


# --- chats


async def chat_prompt(
    engine: Engine,
    messages: Sequence[dict[str, Any]],
    tools: ToolPlan,
    variables: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> Prompt:
    """The prompt of a request's ``messages`` in the model's template, with ``tools`` and further ``variables`` of the template.

    Args:
        continues: the answer goes on from the last message, which is the assistant's.

    Raises ApiError where a text model cannot read them, the template refuses them, or they are longer than the context.
    """
    if not messages:
        raise ApiError(400, "messages is empty; give at least one", "messages")
    turns = template_messages(messages)
    if not tools.calls_shown:
        turns = [with_calls_as_text(turn, tools.forms[0], keeps_results=tools.shown) for turn in turns]
    if tools.tools and not tools.shown:
        turns = with_tools_described(turns, tools.tools, tools.forms[0])
    extra: dict[str, Any] = {**(variables or {}), **({"tools": tools.tools} if tools.tools and tools.shown else {})}
    if continues:
        turns[-1] = _cut(turns[-1])
        extra["add_generation_prompt"] = False
    try:
        prompt = await off_loop(_characters([turns, extra]), _chat_prompt, engine, turns, extra, continues)
    except PromptError as error:
        raise ApiError(400, str(error), "messages") from error
    check_length(engine, prompt.ids, "messages")
    return prompt


def _characters(value: Any) -> int:
    """Characters that ``value``, as JSON has it, takes in a template at least; the count ends where they are many."""
    count = 0
    pending = [value]
    while pending and count < _LONG:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
        count += len(item) if isinstance(item, str) else 1
    return count


def _cut(turn: Mapping[str, Any]) -> dict[str, Any]:
    """``turn`` with a sign where the prompt ends. Space at the end of its text is left out: the answer's tokens begin with it."""
    text = joined_parts(turn.get("content") or "").rstrip()
    if turn["role"] != "assistant" or not text or turn.get("tool_calls"):
        reason = "has to be the assistant's, with a text and without tool_calls, for an answer to go on from it"
        raise ApiError(400, f"the last of messages {reason}", "messages")
    return {**turn, "content": text + _CUT}


def _chat_prompt(engine: Engine, turns: Sequence[dict[str, Any]], extra: dict[str, Any], continues: bool) -> Prompt:
    text = engine.chat_text(turns, **extra)
    if continues:
        text, sign, _ = text.rpartition(_CUT)
        if not sign:
            raise ApiError(400, "messages: the chat template does not show the last one; end with the user's", "messages")
    assert engine.tokenizer is not None
    check_text(engine, text, "messages")
    return Prompt(engine.tokenizer.encode(text, add_special_tokens=False), text)


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` without the fields that have no meaning for a model. The engine brings them into its template's form.

    Raises ApiError with the path as ``param`` for what a text model cannot read: audio, functions of old, no content.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def with_tools_described(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: CallForm = HERMES
) -> list[dict[str, Any]]:
    """``messages`` with ``tools`` and the ``form`` of calls in the system message, where the template does not show them."""
    functions = "\n".join(json.dumps(_described(tool["function"]), ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(functions=functions, example=form.text([("FUNCTION", {"ARGUMENT": "VALUE"})]))
    if messages[0]["role"] in ("system", "developer"):
        content = f"{joined_parts(messages[0]['content'])}\n\n{description}".strip()
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def with_calls_as_text(message: dict[str, Any], form: CallForm = HERMES, keeps_results: bool = False) -> dict[str, Any]:
    """``message`` with its calls, or what they returned, as text, where the template does not show them.

    Args:
        form: of the calls.
        keeps_results: the template shows what calls returned.
    """
    if message["role"] == "tool" and not keeps_results:
        return {"role": "user", "content": f"<tool_response>\n{joined_parts(message['content'])}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = form.text([(function["name"], arguments_object(function["arguments"])) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = joined_parts(message["content"] or "")
    return {**rest, "content": f"{content}\n{calls}" if content else calls}


def _template_message(message: dict[str, Any], at: str) -> dict[str, Any]:
    role = message["role"]
    for name, instead in (("audio", "its text as content"), ("function_call", "tool_calls")):
        if message.get(name) is not None:
            raise ApiError(400, f"{at}.{name} is not supported; send {instead}", f"{at}.{name}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        content = message.get("refusal")
        if role == "assistant" and not (content or calls):
            raise ApiError(400, f"{at}.content is missing; give a text, or tool_calls", f"{at}.content")
    if role == "tool":
        content = text_parts(content or "")
    rendered = {"role": role, "content": _template_content(content)}
    if calls:
        rendered["tool_calls"] = [_template_call(call) for call in calls]
    return rendered | {key: message[key] for key in _PASSED if message.get(key) is not None}


def _template_content(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    return [{"type": "text", "text": part[part["type"]]} for part in content]


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return {"id": call["id"], "type": "function", "function": function}


def _described(function: dict[str, Any]) -> dict[str, Any]:
    return {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}


# --- texts


def each_prompt(prompt: str | list[Any], param: str = "prompt") -> list[str | list[int]]:
    """The prompts of the field ``param``: text, a list of texts, token ids, or a list of them. Raises ApiError for none."""
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else prompt
    if not prompts:
        raise ApiError(400, f"{param} is an empty list; give text or token ids", param)
    return prompts  # type: ignore[return-value]


async def text_prompt(engine: Engine, prompt: str | list[int]) -> Prompt:
    """A prompt of text or token ids. Raises ApiError as `ids_of_texts` does."""
    [ids] = await ids_of_texts(engine, [prompt])
    return Prompt(ids, prompt if isinstance(prompt, str) else _decoded(engine, ids))


async def ids_of_texts(engine: Engine, texts: Sequence[str | list[int]], param: str = "prompt") -> list[list[int]]:
    """Token ids of each text. Raises ApiError for one that is empty, too long, or has ids outside the vocabulary."""
    try:
        return await off_loop(sum(map(len, texts)), lambda: [_text_ids(engine, text, param) for text in texts])
    except PromptError as error:
        raise ApiError(400, str(error), param) from error


def _text_ids(engine: Engine, prompt: str | list[int], param: str) -> list[int]:
    if isinstance(prompt, str) and engine.tokenizer is not None:
        check_text(engine, prompt, param)
        prompt = engine.tokenizer.encode(prompt)
    if isinstance(prompt, list):
        check_length(engine, prompt, param)
    return engine.admission.token_ids(prompt)


def _decoded(engine: Engine, ids: Sequence[int]) -> str:
    """The text of ``ids`` with special tokens; empty where the bundle has no tokenizer."""
    return engine.tokenizer.decode(ids, skip_special_tokens=False) if engine.tokenizer is not None else ""


# --- length


def check_length(engine: Engine, ids: Sequence[int], param: str) -> None:
    """Raise ApiError for a prompt that is longer than the context."""
    if len(ids) > engine.manifest.max_seq_len:
        raise _too_long(engine, len(ids), f"{len(ids)} tokens", param)


def check_text(engine: Engine, text: str, param: str) -> None:
    """Raise ApiError for a text that is certainly longer than the context, before processor time is spent on its tokens."""
    context = engine.manifest.max_seq_len
    if engine.tokenizer is None or len(text) <= context:  # the bound reads the whole vocabulary once: for long texts only
        return
    fewest = engine.tokenizer.bound.fewest_tokens(text)
    if fewest > context:
        raise _too_long(engine, fewest, f"at least {fewest} tokens", param)


def _too_long(engine: Engine, fewest: int, tokens: str, param: str) -> ApiError:
    manifest = engine.manifest
    message = f"{param}: {tokens}, the context holds {manifest.max_seq_len}; {ways_to_fit(manifest, fewest)}"
    return ApiError(400, message, param, "context_length_exceeded")
