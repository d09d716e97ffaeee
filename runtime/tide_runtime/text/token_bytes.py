"""The bytes of single tokens, which may be part of a character."""

from __future__ import annotations

from functools import cached_property, lru_cache

from tide_runtime.text.tokenizer import Tokenizer

_CACHED = 1 << 16  # tokens


class TokenBytes:
    """Bytes of a tokenizer's tokens; joined, those of an output are its text.

    ``of(token)``: the bytes of a token, empty for an id without one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(_CACHED)(self._of)

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """Character of a byte-level vocabulary → its byte; None: the vocabulary is of another kind."""
        return _byte_level_alphabet() if _is_byte_level(self._tokenizer) else None

    def _of(self, token: int) -> bytes:
        entry = self._tokenizer.token(token)
        if entry is None:
            return b""
        if token in self._tokenizer.byte_ids:
            return bytes([self._tokenizer.byte_ids[token]])
        if token in self._tokenizer.special_ids:
            return entry.encode()
        if self._byte_of is not None and all(character in self._byte_of for character in entry):
            return bytes(self._byte_of[character] for character in entry)
        return entry.replace("\u2581", " ").encode()  # sentencepiece's sign for a space


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary spells bytes as printable characters, as GPT-2's does: its entries have Ġ for a space."""
    ids = tokenizer.encode("a b", add_special_tokens=False)
    return any("\u0120" in (tokenizer.token(token) or "") for token in ids)


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte. Printable bytes of Latin-1 stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}
