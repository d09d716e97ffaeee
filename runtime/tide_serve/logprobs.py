"""Log-probabilities in the forms of /v1/chat/completions and /v1/completions. All output tokens have one, end tokens too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tide_runtime.sampler import TokenLogprob

from tide_serve.token_texts import TextOffsets, TokenTexts

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
    entries: Sequence[TokenLogprob], top: int, texts: TokenTexts, offsets: TextOffsets, unscored: Sequence[int] = ()
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice.

    Args:
        offsets: of the choice's text, behind the tokens of earlier events.
        unscored: tokens before them that have no probability: the first one of an echoed prompt.
    """
    tokens = [*unscored, *(entry.token for entry in entries)]
    return {
        "tokens": [texts.text_of(token) for token in tokens],
        "token_logprobs": [*(None for _ in unscored), *(max(entry.logprob, _LEAST) for entry in entries)],
        "top_logprobs": [*(None for _ in unscored), *(_top(entry, top, texts) for entry in entries)],
        "text_offset": offsets.of(tokens),
    }


def _top(entry: TokenLogprob, top: int, texts: TokenTexts) -> dict[str, float]:
    """Text → log-probability of the likeliest tokens and the chosen one; of tokens with the same text the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top[:top], (entry.token, entry.logprob)):
        found.setdefault(texts.text_of(token), max(logprob, _LEAST))
    return found
