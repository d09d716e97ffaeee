"""Tools that a template does not show are described, and calls and results become text, in chats that it takes."""

from __future__ import annotations

import pytest
from runtime.text.test_template_turns import TEMPLATES, chat
from tide_runtime.text.chat_template import render_chat, template_forms
from tide_serve.request.prompt_ids import template_messages, with_calls_as_text, with_tools_described

TOOL = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": {"type": "object"}}}
# Without the calls of the others, which these templates do not show.
NO_TOOLS = {name: template.partition("{% for c in m.tool_calls")[0] + "]{% endfor %}" for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("roles", ["u", "su", "ucr", "uccrr", "ucru", "uccrrsu"])
@pytest.mark.parametrize("name", NO_TOOLS)
def test_described_tools_fit_every_template(name: str, roles: str) -> None:
    """Breaks: every request with tools is refused for Gemma, Llama 2 and early Mistral models, or the turn after two calls is."""
    template = NO_TOOLS[name]
    assert not template_forms(template).shows_calls
    turns = [with_calls_as_text(turn) for turn in template_messages(chat(roles))]
    prompt = render_chat(template, with_tools_described(turns, [TOOL]), special_tokens={})
    assert prompt.count("does it") == 1
    assert [prompt.count(f"#{index}#") for index in range(len(roles))] == [1] * len(roles)
