"""Encoding and decoding of text, complete (`Tokenizer`) or token by token (`TextStream`)."""

from __future__ import annotations

import codecs
import string
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tide_runtime.errors import BundleError, PromptError
from tide_runtime.text.prefix_match import partial_match_length
from tide_runtime.text.thoughts import Thoughts, ThoughtSplitter
from tide_runtime.text.token_bound import TokenBound

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"  # decoded from bytes that are no complete UTF-8 character
LONGEST_CHARACTER = 4  # bytes, and therefore tokens, of a UTF-8 character at most


class Tokenizer:
    """A model's tokenizer.json."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may contain truncation or padding settings of the training; transformers resets both as well.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_ids = _byte_tokens(backend)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Raises `BundleError` if the file is missing or is not a tokenizer.json."""
        import tokenizers

        if not Path(path).is_file():
            raise BundleError(f"No tokenizer at {path}; expected a tokenizer.json file. Export the bundle again.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the Rust library raises plain Exception for every defect of the file
            raise BundleError(f"{path} is not a readable tokenizer.json ({error}). Export the bundle again.") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def bound(self) -> TokenBound:
        """How few tokens a text may have."""
        return TokenBound.of(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A rendered chat has its special tokens already: encode it with False."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise PromptError(f"The prompt {text!a:.60} is not valid Unicode; pass text that is.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token are skipped."""
        try:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise PromptError(f"Cannot decode the token ids ({error}); expected integers >= 0.") from error

    def continuation(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` after other text: with the space that its first token has, which `decode` drops for sentencepiece."""
        return self.decode([*self.lead, *ids], skip_special_tokens)[len(self.decode(self.lead)) :]

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """A token to decode before others where the decoder strips a space from its first token; empty where it does not."""
        decoder = self._backend.decoder
        if decoder is None or (decoder.decode(["\u2581x"]), decoder.decode(["x", "\u2581x"])) != ("x", "x x"):
            return ()
        ids = (self._backend.token_to_id(character) for character in string.printable)
        return next(((token_id,) for token_id in ids if token_id is not None and token_id not in self.special_ids), ())

    def token(self, token_id: int) -> str | None:
        """The raw vocabulary entry of an id >= 0, such as "Ġthe", or None."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a raw vocabulary entry, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Id to byte of sentencepiece's byte tokens, `<0x00>` to `<0xFF>`; empty if they are not decoded as bytes."""
    if backend.decoder is None or b"ByteFallback" not in backend.decoder.__getstate__():
        return {}
    ids = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in ids.items() if token_id is not None}


class TextStream:
    """Incremental decoding of one sequence, which continues a prompt.

    The returned pieces, joined, are `Tokenizer.continuation` of all ids, cut before the first completed stop string. Incomplete
    characters, and text that may become a stop string, are held back. A stop string may spell special tokens, also where the
    text leaves them out.

    A token's text can depend on its neighbours (bytes of a character, sentencepiece's leading space), so each token is
    decoded with the tokens of the previous piece as context, which are few however long the text is. The result differs from
    complete decoding in one case: a byte-fallback decoder turns valid characters next to an invalid byte into U+FFFD, but
    characters that were already returned are not changed.

    Args:
        shown: special tokens that the text has although it leaves out others.
        thoughts: stop strings count behind these only; None: in all of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        thoughts: Thoughts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(shown) if skip_special_tokens else frozenset[int]()
        self._window = list(tokenizer.lead)  # context, then pending tokens
        self._context = len(self._window)  # how many tokens of the window are context
        self._context_text = self._decode(self._window)
        self._character = codecs.getincrementaldecoder("utf-8")("replace")  # tracks runs of byte tokens
        self._marks = _marks(tokenizer, self._skipped, stop)
        self._stops = StopStrings(stop, {self._tokenizer.token(token) or "": mark for token, mark in self._marks.items()})
        self._thoughts = ThoughtSplitter(thoughts.marks, thoughts.begun) if thoughts is not None and stop else None
        self._flushed = False

    @property
    def stop_hit(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.hit

    @property
    def finished(self) -> bool:
        """Whether no more text will come: a stop string was completed, or the stream was flushed."""
        return self._flushed or self.stop_hit is not None

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is final now, often empty."""
        if self.finished:
            return ""
        if token_id in self._skipped or self._tokenizer.token(token_id) is None:
            return self._pass_mark(token_id) if token_id in self._marks else ""
        self._window.append(token_id)
        end = len(self._window) - self._unfinished_bytes(token_id)
        if end == self._context:
            return ""
        text = self._decode(self._window[:end])
        if text.endswith(REPLACEMENT) and not self._tokenizer.byte_ids:
            return self._feed(self._take_settled(text))
        return self._feed(self._take(end, text))

    def flush(self) -> str:
        """End the stream; returns the text held back so far."""
        if self.finished:
            return ""
        self._flushed = True
        shown = self._feed(self._take(len(self._window), self._decode(self._window)), last=True)
        return shown + self._stops.drain()

    def _feed(self, text: str, last: bool = False) -> str:
        """``text`` up to where it may become, or is, a stop string behind the thoughts."""
        if self._thoughts is None:
            return self._stops.feed(text)
        _, answer, before = self._thoughts.feed(text, last)
        return before + (self._stops.feed(answer) if answer else "")

    def _unfinished_bytes(self, token_id: int) -> int:
        """Number of trailing byte tokens of an incomplete character."""
        byte = self._tokenizer.byte_ids.get(token_id)
        if byte is None:
            self._character.reset()
            return 0
        self._character.decode(bytes([byte]))
        return len(self._character.getstate()[0])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # those to skip never get into the window

    def _pass_mark(self, token_id: int) -> str:
        """Have a skipped special token end the pending characters and count for the stop strings."""
        self._character.reset()
        shown = self._feed(self._take(len(self._window), self._decode(self._window)))
        if self.stop_hit is not None or (self._thoughts is not None and self._thoughts.phase == "thoughts"):
            return shown
        return shown + self._stops.feed(self._marks[token_id])

    def _take(self, end: int, text: str) -> str:
        """Return the text of the pending tokens before window position `end`, which become the context.

        `text` is the decoded window[:end].
        """
        fresh = text[len(self._context_text) :]
        if fresh:  # tokens without text, such as a stripped leading space, stay pending: the next text depends on them
            self._window = self._window[self._context :]
            self._context = end - self._context
            self._context_text = self._decode(self._window[: self._context])
        return fresh

    def _take_settled(self, text: str) -> str:
        """Return the text of pending byte-level tokens that later tokens cannot change; the window's `text` ends in U+FFFD.

        Up to four tokens may be an incomplete character. More contain invalid bytes; the text is final up to the last token
        boundary inside no character, where both sides decode separately to the same text as together.
        """
        pending = len(self._window) - self._context
        if pending <= LONGEST_CHARACTER:
            return ""
        for end in range(len(self._window) - 1, len(self._window) - 1 - LONGEST_CHARACTER, -1):
            head = self._decode(self._window[:end])
            if head + self._decode(self._window[end:]) == text:
                return self._take(end, head)
        return ""


def _marks(tokenizer: Tokenizer, skipped: Collection[int], stops: Sequence[str]) -> dict[int, str]:
    """Skipped special tokens that ``stops`` spell, each with a character that no text has: a lone surrogate."""
    if not stops:
        return {}
    spelled = {token_id: text for token_id in skipped if (text := tokenizer.token(token_id)) and any(text in s for s in stops)}
    return {token_id: chr(0xD800 + number) for number, token_id in enumerate([*spelled][:0x400])}


class StopStrings:
    """Finds stop strings in streamed text, and holds back text that may be the start of one.

    Args:
        marks: special token → the character that stands for it in the text that is fed; it is left out of what is returned.
    """

    def __init__(self, stops: Sequence[str], marks: Mapping[str, str] | None = None) -> None:
        self._spelled = {stop: stop for stop in stops}  # as it is in the text → as it was given
        longest_first = sorted(marks or {}, key=len, reverse=True)
        for stop in stops:
            marked = stop
            for token in longest_first:
                marked = marked.replace(token, (marks or {})[token])
            self._spelled[marked] = stop
        self._stops = tuple(self._spelled)
        self._hidden = dict.fromkeys(map(ord, (marks or {}).values()))
        self._pending = ""
        self.hit: str | None = None

    def feed(self, piece: str) -> str:
        """Add text; returns the part that certainly precedes any stop string."""
        text = self._pending + piece
        self._pending = ""
        # The stop string that ends first wins, and among those with the same end the longest.
        found = min(((at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0), default=None)
        if found is not None:
            _, start, hit = found
            self.hit = self._spelled[hit]
            return self._shown(text[:start])
        certain = len(text) - partial_match_length(text, self._stops)
        self._pending = text[certain:]
        return self._shown(text[:certain])

    def drain(self) -> str:
        """Return the text held back; at the end of the stream it cannot become a stop string."""
        pending = self._pending
        self._pending = ""
        return self._shown(pending)

    def _shown(self, text: str) -> str:
        return text.translate(self._hidden) if self._hidden else text
