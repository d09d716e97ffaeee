"""Log-probabilities in the forms of /v1/chat/completions and /v1/completions. All output tokens have one, end tokens too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from tide_runtime.sampler import TokenLogprob

from tide_serve.token_texts import TokenTexts

_LEAST = -9999.0  # OpenAI's value of what is as good as impossible; JSON has no infinity


def chat_logprobs(entries: Iterable[TokenLogprob], top: int, texts: TokenTexts) -> dict[str, Any]:
    """``logprobs`` of a chat choice, with the ``top`` likeliest tokens of each place."""
    content = []
    for entry in entries:
        likeliest = [_chat_token(token, logprob, texts) for token, logprob in entry.top[:top]]
        content.append({**_chat_token(entry.token, entry.logprob, texts), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text_of(token), "logprob": max(logprob, _LEAST), "bytes": [*texts.bytes_of(token)]}


def completion_logprobs(
    entries: Sequence[TokenLogprob], top: int, texts: TokenTexts, places: Sequence[tuple[str, int]], unscored: int = 0
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice.

    Args:
        places: text and offset of each token.
        unscored: tokens before ``entries`` that have no probability: the first one of an echoed prompt.
    """
    nothing = [None] * unscored
    shown = [text for text, _ in places]
    return {
        "tokens": shown,
        "token_logprobs": [*nothing, *(max(entry.logprob, _LEAST) for entry in entries)],
        "top_logprobs": [*nothing, *map(_top, entries, repeat(top), repeat(texts), shown[unscored:])],
        "text_offset": [offset for _, offset in places],
    }


def _top(entry: TokenLogprob, top: int, texts: TokenTexts, shown: str) -> dict[str, float]:
    """Text → log-probability of the likeliest tokens and the chosen one; of tokens with the same text the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top[:top], (entry.token, entry.logprob)):
        found.setdefault(shown if token == entry.token else texts.text_of(token), max(logprob, _LEAST))
    return found
