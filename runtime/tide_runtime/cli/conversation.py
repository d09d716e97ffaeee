"""``tide-run --interactive``: a chat on the terminal, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from tide_runtime.cli.errors import report
from tide_runtime.engine import Engine
from tide_runtime.errors import PromptError
from tide_runtime.outputs import Generation

with suppress(ImportError):  # not everywhere in Python; lines are then edited as the terminal does it
    import readline  # noqa: F401  # `input` edits lines with it, and keeps those of this process

CLEAR = "/clear"
_HELP = ("/help", "/?")
_END = ("/bye", "/exit", "/quit")
KEYS = f"Ctrl-C stops an answer, {CLEAR} begins a new conversation, Ctrl-D or {_END[0]} ends, Up has earlier lines."


def converse(
    engine: Engine, opening: list[dict[str, str]], answer: Callable[[list[int]], Generation], note: Callable[[str], None]
) -> None:
    """Chat until Ctrl-D, or Ctrl-C where a message is awaited.

    A turn is left out of the conversation if its prompt is refused, or if it was stopped before the first word of the answer.

    Args:
        opening: messages that each conversation begins with.
        answer: writes the answer to a prompt of token ids, until Ctrl-C.
        note: prints a line that is no part of the conversation.
    """
    engine.chat_prompt([*opening, {"role": "user", "content": "hello"}])  # fails before the first input, if the template does
    note(f"{engine.manifest.model.name}. {KEYS}")
    messages = opening
    while True:
        try:
            message = input("> ")
        except EOFError:
            print()
            return
        command = message.strip()
        if command in _END:
            return
        if command in _HELP:
            note(KEYS)
        elif command == CLEAR:
            messages = opening
        elif command:
            asked = [*messages, {"role": "user", "content": message}]
            try:
                generation = answer(engine.chat_prompt(asked))
            except PromptError as error:
                report(error)
                note(f"this message is left out of the conversation; {CLEAR} begins a new one")
                continue
            if generation.text or generation.finish_reason != "cancelled":
                messages = [*asked, {"role": "assistant", "content": generation.text or ""}]
