"""Log-probabilities in the forms of /v1/chat/completions and /v1/completions, and tokens as text and bytes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

from tide_runtime.sampler import TokenLogprob
from tide_runtime.text.token_bytes import TokenBytes
from tide_runtime.text.tokenizer import TextStream, Tokenizer

_MIN_LOGPROB = -9999.0  # OpenAI's value of what is as good as impossible; JSON has no infinity
_CACHED = 1 << 16  # tokens
_SLACK = 8  # characters of a prompt that a tokenizer may have dropped before a token


def chat_logprobs(entries: Iterable[TokenLogprob], top: int, texts: TokenTexts) -> dict[str, Any]:
    """``logprobs`` of a chat choice, with the ``top`` likeliest tokens at each. All output tokens have one, end tokens too."""
    content = []
    for entry in entries:
        likeliest = [_chat_token(token, logprob, texts) for token, logprob in entry.top[:top]]
        content.append({**_chat_token(entry.token, entry.logprob, texts), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text_of(token), "logprob": max(logprob, _MIN_LOGPROB), "bytes": [*texts.bytes_of(token)]}


def completion_logprobs(
    entries: Sequence[TokenLogprob], top: int, texts: TokenTexts, spans: Sequence[tuple[str, int]], unscored: int = 0
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice.

    Args:
        spans: text and offset of each token.
        unscored: tokens before ``entries`` that have no probability: the first one of an echoed prompt.
    """
    nothing = [None] * unscored
    shown = [text for text, _ in spans]
    return {
        "tokens": shown,
        "token_logprobs": [*nothing, *(max(entry.logprob, _MIN_LOGPROB) for entry in entries)],
        "top_logprobs": [*nothing, *map(_top, entries, repeat(top), repeat(texts), shown[unscored:])],
        "text_offset": [offset for _, offset in spans],
    }


def _top(entry: TokenLogprob, top: int, texts: TokenTexts, shown: str) -> dict[str, float]:
    """Text → log-probability of the likeliest tokens and the chosen one; of tokens with the same text the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top[:top], (entry.token, entry.logprob)):
        found.setdefault(shown if token == entry.token else texts.text_of(token), max(logprob, _MIN_LOGPROB))
    return found


class TokenTexts:
    """Text and bytes of single tokens.

    A token may be part of a character. Its text is then ``bytes:\\xe2\\x80``, as in OpenAI's API; joined, the bytes of an
    output's tokens are its text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.text_of = lru_cache(_CACHED)(self._text_of)

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return TokenBytes(self._tokenizer) if self._tokenizer is not None else None

    def _text_of(self, token: int) -> str:
        raw = self.bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of ``token``, and its number where it has none."""
        return (self._bytes.of(token) if self._bytes is not None else b"") or f"<token {token}>".encode()


class TextOffsets:
    """Where each token of a choice's text begins, in characters, and what the text has of it.

    Tokens of the same character begin where it does. One that the text leaves out, such as a special token, begins where the
    next one does.
    """

    def __init__(self, texts: TokenTexts, tokenizer: Tokenizer | None) -> None:
        self._texts = texts
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._special = tokenizer.special_ids if tokenizer is not None else frozenset[int]()
        self._length = 0

    def of_prompt(self, tokens: Sequence[int], text: str) -> list[tuple[str, int]]:
        """Texts and offsets of ``tokens`` in the prompt ``text``, which comes first, as it was sent."""
        spans = []
        at = 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            shown = self._texts.text_of(token)
            piece = decoder.decode(self._texts.bytes_of(token))
            if piece.startswith(" ") and not text.startswith(" ", at):  # a space that the tokenizer has put there
                shown = shown.removeprefix(" ")
                piece = piece[1:]
            begin = text.find(piece, at, at + len(piece) + (0 if token in self._special else _SLACK))
            spans.append((shown, max(at, begin)))
            at = begin + len(piece) if begin >= 0 else at
        self._length = len(text)
        return spans

    def of(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Texts and offsets of generated ``tokens``, which follow those of earlier calls."""
        return [self._generated(token) for token in tokens]

    def _generated(self, token: int) -> tuple[str, int]:
        shown = self._texts.text_of(token)
        before = self._length
        piece = self._stream.push(token) if self._stream is not None else ""
        self._length += len(piece)
        # A token that only ends a character begins with it; before a whole one, bytes may have turned out to be no character.
        return shown, before + len(piece) - len(shown) if piece.endswith(shown) else before
