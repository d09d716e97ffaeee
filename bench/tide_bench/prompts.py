"""What is continued: windows of tokens from a file of prompts, or from Python's own library, which every machine has."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tide_runtime.errors import PromptError
from tide_runtime.text.tokenizer import Tokenizer

LIBRARY_FILES = 64
LIBRARY_CHARACTERS = 6000  # characters of each file: prompts end in the middle of code, not with a file


def library_texts() -> list[str]:
    """Modules of the installed Python's standard library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]
    return [text[:LIBRARY_CHARACTERS] for text in texts if len(text) > LIBRARY_CHARACTERS][:LIBRARY_FILES]


def read_prompts(path: Path | None, tokenizer: Tokenizer | None) -> list[list[int]]:
    """All prompts as token ids. ``path``: JSON lines with ``prompt`` (text) or ``ids``, or text with a prompt a line.

    Raises PromptError when a line is neither, or when text is given and the bundle has no tokenizer.
    """
    if path is None:
        return [_encode(text, tokenizer) for text in library_texts()]
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return [_encode(line, tokenizer) for line in lines]
    return [_from_json(f"{path}:{number}", line, tokenizer) for number, line in enumerate(lines, 1)]


def windows(prompts: Sequence[Sequence[int]], tokens: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` tokens: the ends of those that are long enough, the first ones again when they run out.

    Raises PromptError when none is long enough.
    """
    enough = [list(prompt[-tokens:]) for prompt in prompts if len(prompt) >= tokens]
    if not enough:
        longest = max((len(prompt) for prompt in prompts), default=0)
        raise PromptError(f"no prompt has {tokens} tokens, the longest has {longest}; give longer ones or fewer --prompt-tokens")
    return [enough[i % len(enough)] for i in range(count)]


def joined(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Texts of at least ``tokens`` tokens, made of prompts one behind the other: what long contexts are measured on."""
    texts = list[list[int]]()
    text = list[int]()
    for prompt in prompts:
        text += prompt
        if len(text) >= tokens:
            texts.append(text)
            text = []
    return texts


def _from_json(place: str, line: str, tokenizer: Tokenizer | None) -> list[int]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{place} is not JSON ({error.msg}); write one object a line") from error
    if isinstance(entry, dict) and isinstance(entry.get("ids"), list):
        return [int(token) for token in entry["ids"]]
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return _encode(entry["prompt"], tokenizer)
    raise PromptError(f'{place} has neither "prompt" (text) nor "ids" (a list of token ids)')


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise PromptError('this bundle has no tokenizer; give --prompts a .jsonl file with "ids"')
    return list(tokenizer.encode(text))
