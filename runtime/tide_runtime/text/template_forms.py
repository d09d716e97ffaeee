"""The forms in which a chat template takes messages, found by rendering a made-up chat in each of them.

Templates differ where OpenAI's API has one form: arguments of calls are an object to most and text to DeepSeek's, no content is
none, absent or "", and content parts are a list or joined. A form that a template cannot take shows: the template fails, writes a
value as Python spells it, or leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from typing import Any, Literal, get_args

from jinja2 import meta, nodes

from tide_runtime.text.message_parts import arguments_object, joined_parts

Render = Callable[[list[dict[str, Any]]], str | None]
NoContent = Literal["none", "absent", "empty"]
Arguments = Literal["object", "text"]

# Words that no template has: a prompt with one shows what was called so.
_WORD = "vreluth"
_FUNCTION = "qazimor"
_KEY = "wexolin"
_VALUE = "jubatek"
_OBJECT = {_KEY: _VALUE}
_TEXT = json.dumps(_OBJECT)
_LONG_ID, _SHORT_ID = "call_0123456789abcdef01234567", "a1b2c3d4e"
_SHORT = len(_SHORT_ID)  # characters; Mistral's templates demand ids of this length


@dataclass(frozen=True)
class TemplateForms:
    """What a template makes of messages.

    Args:
        takes_tools: it uses the variable ``tools``.
        takes_developers: it has a role ``developer``; otherwise such a message is the system's.
        parts: a user's content parts may be a list, must be, or are joined to text.
        shows_calls: calls of an assistant's message get into the prompt.
        arguments: those of a call are an object, or its JSON as text.
        no_content: of a message that only has calls.
        short_ids: ids of calls must have nine letters and digits.
    """

    takes_tools: bool = False
    takes_developers: bool = False
    parts: Literal["allowed", "required", "joined"] = "joined"
    shows_calls: bool = False
    arguments: Arguments = "object"
    no_content: NoContent = "empty"
    short_ids: bool = False

    @classmethod
    def of(cls, source: nodes.Template, render: Render) -> TemplateForms:
        """The forms of the template ``source``. ``render`` gives its text for messages; None where it fails."""
        # Before jinja2.meta, which folds constants of the tree in place.
        takes_developers = any(constant.value == "developer" for constant in source.find_all(nodes.Const))
        forms = cls("tools" in meta.find_undeclared_variables(source), takes_developers, _parts(render))
        tries: list[TemplateForms] = [
            replace(forms, shows_calls=True, arguments=arguments, no_content=no_content, short_ids=short_ids)
            for short_ids, no_content, arguments in product((False, True), get_args(NoContent), get_args(Arguments))
        ]
        if shown := next((tried for tried in tries if tried._shows_call(render)), None):
            return shown
        taken = next((tried for tried in tries if tried._prompt(render) is not None), None)
        return replace(taken or forms, shows_calls=False)

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """``message`` in these forms, without keys that are null."""
        formed = {key: value for key, value in message.items() if value is not None}
        calls, content = formed.get("tool_calls"), formed.get("content")
        if formed["role"] == "developer" and not self.takes_developers:
            formed["role"] = "system"
        if calls:
            formed["tool_calls"] = [self._call(call) for call in calls]
        if self.short_ids and "tool_call_id" in formed:
            formed["tool_call_id"] = _short_id(formed["tool_call_id"])
        if content or not calls:
            formed["content"] = self._content(content or "", formed["role"])
        else:
            formed |= {"content": None if self.no_content == "none" else self._content("", formed["role"])}
            if self.no_content == "absent":
                del formed["content"]
        return formed

    def _content(self, content: Any, role: str) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.parts == "required" else content
        kept = self.parts == "required" or (self.parts == "allowed" and role == "user")
        return content if kept else joined_parts(content)

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        function = call["function"]
        arguments = call["function"].get("arguments")
        if self.arguments == "object":
            arguments = arguments_object(arguments)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        short = {"id": _short_id(call["id"])} if self.short_ids and "id" in call else {}
        return {**call, **short, "function": {**function, "arguments": arguments}}

    def _prompt(self, render: Render) -> str | None:
        """The prompt of a chat with a call in these forms; None where the template fails, or writes none as a word."""
        prompt = render(_chat(self, None))
        if prompt is None or self.no_content == "empty" or "None" not in prompt:
            return prompt
        return prompt if prompt.count("None") == (render(_chat(self, _WORD)) or "").count("None") else None

    def _shows_call(self, render: Render) -> bool:
        """Whether the call is in the prompt, and its arguments as they should be."""
        prompt = self._prompt(render) or ""
        if self.arguments == "text":
            return _TEXT in prompt or (_FUNCTION in prompt and _KEY not in prompt)
        return _KEY in prompt and _VALUE in prompt and str(_OBJECT) not in prompt


def _parts(render: Render) -> Literal["allowed", "required", "joined"]:
    as_text, as_parts = (render([{"role": "user", "content": form}]) for form in (_WORD, [{"type": "text", "text": _WORD}]))
    if as_parts is not None and as_parts == as_text:
        return "allowed"
    shows_parts = as_parts is not None and _WORD in as_parts and "'text'" not in as_parts and '"text"' not in as_parts
    return "required" if shows_parts and _WORD not in (as_text or "") else "joined"


def _chat(forms: TemplateForms, content: str | None) -> list[dict[str, Any]]:
    """A chat with a call."""
    call_id = _SHORT_ID if forms.short_ids else _LONG_ID
    call = {"id": call_id, "type": "function", "function": {"name": _FUNCTION, "arguments": _OBJECT}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": _WORD},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": _WORD, "content": _WORD},
    ]
    return [forms.message(message) for message in chat]


def _short_id(call_id: Any) -> Any:
    if not isinstance(call_id, str):
        return call_id
    short = len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum()
    return call_id if short else sha256(call_id.encode()).hexdigest()[:_SHORT]
