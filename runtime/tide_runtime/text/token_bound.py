"""The fewest tokens that a text can have, known without encoding it: encoding takes 0.7 s for a megabyte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_KEEPS_TEXT = {"ByteLevel", "Digits", "Split"}  # pre-tokenizers; a Split may also remove what it finds


@dataclass(frozen=True)
class TokenBound:
    """What a tokenizer's vocabulary says about the length of any text.

    Args:
        longest: characters of text that one token covers at most; None: no limit is known.
        ascii_only: the limit holds for ASCII text. NFC joins other characters before they are counted.
    """

    longest: int | None
    ascii_only: bool = False

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBound:
        """The limit of byte-level BPE whose vocabulary has every byte: its entries have a character for each byte of their text.

        Others may drop white space or take any number of unknown characters for one token, so no limit is known of them.
        """
        normalizer = _state(backend.normalizer).get("type")
        strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        if normalizer not in (None, "NFC") or strips or not _is_byte_level(backend):
            return cls(None)
        return cls(max(map(len, backend.get_vocab(with_added_tokens=True))), ascii_only=normalizer is not None)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of ``text``; 0 where none is known."""
        if self.longest is None or (self.ascii_only and not text.isascii()):
            return 0
        return -(-len(text) // self.longest)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether every byte of a text is in exactly one token."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model = backend.model
    steps = _steps(_state(backend.pre_tokenizer))
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    kinds = {step.get("type") for step in steps}
    removes = any(step.get("behavior") == "Removed" for step in steps)
    has_bytes = set(ByteLevel.alphabet()) <= backend.get_vocab(with_added_tokens=False).keys()
    return "ByteLevel" in kinds <= _KEEPS_TEXT and not removes and has_bytes


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its JSON has it; empty where there is none."""
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state


def _steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps
