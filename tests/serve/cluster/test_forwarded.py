"""The key by which requests that begin alike meet on one replica."""

import json

import pytest
from tide_serve.cluster.forwarded import OPENING_CHARS, OPENING_TOKENS, opening

SYSTEM = {"role": "system", "content": "Be brief. " * 300}


def _opening(**request) -> str:
    return opening(json.dumps(request).encode())


def _chat(*contents: str, **fields) -> str:
    roles = ("user", "assistant") * len(contents)
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return _opening(messages=[SYSTEM, *turns], **fields)


def test_turns_of_a_conversation_stay_together():
    """Breaks: every turn of a chat is computed from its beginning by another replica."""
    first = _chat("Hello")
    assert first and first == _chat("Hello", "Hi!", "What is the weather?")


def test_conversations_with_one_system_prompt_spread():
    """Breaks: all users of an application land on one replica, as they share its system prompt."""
    assert _chat("Hello") != _chat("Good morning")


def test_prompts_that_begin_alike_meet():
    """Breaks: a long few-shot prefix is computed on every replica for each question behind it."""
    shots = "Q: 1 + 1? A: 2\n" * OPENING_CHARS
    assert _opening(prompt=shots + "Q: 2 + 2?") == _opening(prompt=shots + "Q: 3 + 3?") != _opening(prompt="Q: 3 + 3?")
    ids = list(range(OPENING_TOKENS))
    assert _opening(prompt=[*ids, 1]) == _opening(prompt=[*ids, 2]) != _opening(prompt=[1, 2])
    assert _opening(prompt=["one", "two"]) == _opening(prompt="one")


def test_salts_and_instructions_separate():
    """Breaks: requests that may not share a prefix cache are sent to one replica for nothing."""
    assert _chat("Hello", cache_salt="a") != _chat("Hello", cache_salt="b")
    assert _opening(input="Hello", instructions="Be brief") and _opening(input="Hello") != _opening(input="Bye")


def test_what_changes_from_turn_to_turn_does_not_separate():
    """Breaks: turns of one conversation with Anthropic's clients go to other replicas: marks for caching move on, and Claude Code
    begins its system prompt with a line that is never the same."""
    first: dict[str, object] = {"type": "text", "text": "Hello"}
    marked = {**first, "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": [marked]}]
    system: list[dict[str, object]] = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;\nBe brief"}]
    once = _opening(messages=[{"role": "user", "content": [marked]}], system=system)
    later = [{"role": "user", "content": [first]}, *turns]
    assert once == _opening(
        messages=later, system=[system[0] | {"cache_control": None, "text": "x-anthropic-billing-header: cch=2;\nBe brief"}]
    )
    assert once != _opening(messages=[{"role": "user", "content": [first]}], system="Be long")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[1]", b"3", b'{"prompt": 3}', b'{"messages": []}', b'{"prompt": {}}', b"[" * 100_000,
     b'{"prompt": ' + b"1" * 10_000 + b"}", b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}"],
)  # fmt: skip
def test_malformed_requests_have_no_opening(body):
    """Breaks: a malformed body, which a replica refuses with status 400, fails in the ingress with status 500."""
    assert opening(body) == "" or b"messages" in body
