"""Chats that clients send must become prompts of any template, with every text in them."""

from typing import Any

import pytest
from tide_runtime.text.chat_template import analysed, render_chat

# Written for these tests: what templates of common families refuse, or leave out without a word.
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
LOOP_FIRST = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('first') }}{% endfor %}"
ALTERNATE = (
    "{% set ns = namespace(user=true) %}{% for m in messages if m.role != 'tool' and m.role != 'system' and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('order') }}{% endif %}{% set ns.user = not ns.user %}{% endfor %}"
)
ONE_CALL = "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endfor %}"
TURNS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}]{% endfor %}"
)
DROPS_SYSTEM = TURNS.replace("in messages %}", "in messages if m.role != 'system' %}")
LAST_SYSTEM = "{% for m in messages if m.role == 'system' and loop.last %}<{{ m.content }}>{% endfor %}" + DROPS_SYSTEM
TEMPLATES = {
    "takes all": TURNS,
    "no system": NO_SYSTEM + TURNS,
    "no system, alternating": NO_SYSTEM + ALTERNATE + TURNS,
    "drops system": DROPS_SYSTEM,
    "system first": LOOP_FIRST + TURNS,
    "last system only": LAST_SYSTEM,
    "alternating": LOOP_FIRST + ALTERNATE + TURNS,
    "one call": ONE_CALL + TURNS,
    "one call, alternating": ONE_CALL + LOOP_FIRST + ALTERNATE + TURNS,
    "all at once": ONE_CALL + NO_SYSTEM + ALTERNATE + TURNS,
}
CALLS = [f'(f {{"x": "#{index}#"}})' for index in range(9)]
ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "r": "tool"}
CHATS = ("u", "su", "sdu", "us", "susas", "uauau", "uuaau", "ucrau", "uccrrau", "ucru", "uccrrsu", "succrrucrau", "uaccrrua")


def chat(roles: str) -> list[dict[str, Any]]:
    """A chat of ``roles``, each message with a number; calls that follow each other are one message's."""
    messages: list[dict[str, Any]] = []
    for index, role in enumerate(roles):
        number = roles[:index].count(role)
        if role != "c":
            result = {"tool_call_id": f"call_{number}"} if role == "r" else {}
            messages.append({"role": ROLES[role], "content": f"#{index}#", **result})
            continue
        if roles[index - 1] != "c":
            messages.append({"role": "assistant", "content": None, "tool_calls": []})
        function = {"name": "f", "arguments": f'{{"x": "#{index}#"}}'}
        messages[-1]["tool_calls"].append({"id": f"call_{number}", "type": "function", "function": function})
    return messages


@pytest.mark.parametrize("roles", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_of_a_chat_is_in_the_prompt(name: str, roles: str) -> None:
    """Breaks: an agent gets a 400 for its first request or its second turn, or a model never reads an instruction."""
    prompt = render_chat(TEMPLATES[name], chat(roles), special_tokens={})
    assert [prompt.count(f"#{index}#") for index in range(len(roles))] == [1] * len(roles)


@pytest.mark.parametrize(
    ("name", "roles", "prompt"),
    [
        ("takes all", "ssuuccr", f"[system:#0#][system:#1#][user:#2#][user:#3#][assistant:{CALLS[4]}{CALLS[5]}][tool:#6#]"),
        ("no system", "su", "[user:#0#\n\n#1#]"),
        ("no system, alternating", "sdusas", "[user:#0#\n\n#1#\n\n#2#\n\n#3#][assistant:#4#][user:#5#]"),
        ("system first", "sdusas", "[system:#0#\n\n#1#][user:#2#\n\n#3#][assistant:#4#][user:#5#]"),
        ("system first", "uu", "[user:#0#][user:#1#]"),
        ("alternating", "suuaau", "[system:#0#][user:#1#\n\n#2#][assistant:#3#\n\n#4#][user:#5#]"),
        ("alternating", "ucru", f"[user:#0#][assistant:{CALLS[1]}][tool:#2#\n\n#3#]"),
        ("one call", "uccrru", f"[user:#0#][assistant:{CALLS[1]}][tool:#3#][assistant:{CALLS[2]}][tool:#4#][user:#5#]"),
    ],
)
def test_texts_stay_at_their_place(name: str, roles: str, prompt: str) -> None:
    """Breaks: a reminder in the middle of a chat moves to its beginning, where no cached prefix fits any more."""
    assert render_chat(TEMPLATES[name], chat(roles), special_tokens={}) == prompt


def test_results_follow_their_calls_and_others_are_not_lost() -> None:
    """Breaks: results that come in another order, or of unknown calls, are given to the wrong call."""
    messages = chat("uccrr")
    messages[2:] = [messages[3], {"role": "tool", "tool_call_id": "x", "content": "other"}, messages[2]]
    prompt = render_chat(TEMPLATES["one call"], messages, special_tokens={})
    assert prompt.endswith('"#1#"})][tool:#3#][assistant:(f {"x": "#2#"})][tool:#4#][tool:other]')


def test_what_is_folded_is_said() -> None:
    """Breaks: an operator does not hear that a model reads other messages than clients send."""
    assert analysed(TURNS).turns.notes == ()
    assert len(analysed(TEMPLATES["all at once"]).turns.notes) == 4
